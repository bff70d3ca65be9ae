// Winograd's filtering on a CPU, compiled beside products.cu, which declares what it calls.
#include VOCABULARY
#include "warps.h"
#include "product.h"
namespace fast {
void channel_sums(const Store &db, const Tensor &dy); // channel_sums.h
}
#include "split_k.h"
#include "winograd_tiles.h"
#include "winograd_cpu.h"
