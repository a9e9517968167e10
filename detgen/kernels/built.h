/* What a library was built for; one file of each includes this. */

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <cpuid.h>
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#endif

/* Bits of the widest vectors; a processor without them must not run the library. */
int vector_bits(void) {
#if defined(__AVX512F__)
    return 512;
#elif defined(__AVX2__)
    return 256;
#else
    return 128;
#endif
}

/* Whether this processor has what the library was built for and vector_bits does not say. */
int runs_here(void) {
#ifdef __AVX512VNNI__
    unsigned a, b, c = 0, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c & bit_AVX512VNNI)) return 0;
#ifdef __AVX512BF16__
    if (!a || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & bit_AVX512BF16)) return 0;
#endif
    return 1;
#elif defined(__AVXVNNI__)
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && a && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#elif defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 1;
#endif
}
