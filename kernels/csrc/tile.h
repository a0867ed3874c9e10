// One band of 16 rows times some tokens: the inner loop, once per instruction set.
#pragma once

#include "activations.h"
#include "layout.h"

#if defined(QUANTKIT_PORTABLE)
#include "tile_portable.h"
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "tile_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "tile_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_NEON) && !defined(__ARM_BIG_ENDIAN)
#include "tile_neon.h"
#else
#include "tile_portable.h"
#endif
