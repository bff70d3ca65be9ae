// All sources of the stand-in, as one: it is compiled once, and linked to each program.
#include "cuda/errors.cc"

#include "cuda/devices.cc"
#include "cuda/driver.cc"
#include "cuda/memory.cc"

#include "cuda/copies.cc"
#include "cuda/streams.cc"
#include "cuda/graphs.cc"

#include "cuda/blocks.cc"
#include "cuda/warps.cc"

#include "cuda/launches.cc"

#include "cuda/checks.cc"
#include "cuda/races.cc"
