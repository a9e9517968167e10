/* What a library was built for; one file of each includes this. */

#if defined(__AVX2__)
#include <cpuid.h>
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#endif

#ifdef __AVX2__
/* Whether the processor has what all such builds use, and the system saves the registers of these vectors. */
static int has_vectors(void) {
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA) || !(c & bit_F16C)) return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
#ifdef __AVX512F__
    const unsigned all = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    return (saved & 0xe6) == 0xe6 && (b & all) == all;
#else
    return (saved & 6) == 6 && (b & bit_AVX2) != 0;
#endif
}
#endif

/* Whether this processor has what the library was built for. */
int runs_here(void) {
#ifdef __AVX2__
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!has_vectors()) return 0;
#ifdef __AVX512VNNI__
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c & bit_AVX512VNNI)) return 0;
#ifdef __AVX512BF16__
    if (!a || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & bit_AVX512BF16)) return 0;
#endif
#elif defined(__AVXVNNI__)
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && a && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#endif
    (void)(a + b + c + d);
    return 1;
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 1;
#endif
}
