/* What a library was built for; one file of each includes this. */

#ifdef __AVX512VNNI__
#include <cpuid.h>
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
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & bit_AVX512VNNI) != 0;
#else
    return 1;
#endif
}
