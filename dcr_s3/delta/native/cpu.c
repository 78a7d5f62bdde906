/* Which instruction sets the processor has, and which one is used. */
#include "kernels.h"

int best_simd_level(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi"))
        return 2;
    if (__builtin_cpu_supports("avx2"))
        return 1;
#endif
    return 0;
}

static int level = -1;

int simd_level(void)
{
    return level < 0 ? best_simd_level() : level;
}

void set_simd_level(int wanted)
{
    int best = best_simd_level();
    level = wanted < best ? wanted : best;
}
