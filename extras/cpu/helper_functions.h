// What NVIDIA's samples include for their command lines and times. Those that read pictures or
// compare them with a file are lacking.
#pragma once

#include "helper_string.h"
#include "helper_timer.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <iostream>
#include <vector>
