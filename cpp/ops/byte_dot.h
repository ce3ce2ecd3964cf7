#ifndef GEMMAKV_OPS_BYTE_DOT_H_
#define GEMMAKV_OPS_BYTE_DOT_H_

// The instruction that adds four products of bytes to a 32-bit sum. AVX-512 has
// it (VNNI), AVX2 does not. Two kinds of processors are in between: those that
// have it for the vectors of AVX2 (AVX-VNNI: Intel's since 2021 that have no
// AVX-512), and those whose AVX-512 is older than our targets (Cascade Lake).
// On both the kernels of AVX2 use it, and the target is called AVX2_VNNI.
// Internal to ops.

namespace gkv {

enum class ByteDot {
  kOfTarget,    // what Highway has for the target
  kAvxVnni,     // vpdpbusd in its VEX encoding
  kAvx512Vnni,  // the same in its EVEX encoding
};

// Returns what the kernels of AVX2 use now (see ForceTarget()).
ByteDot CurrentByteDot();

}  // namespace gkv

// Which of these instructions are compiled in. GEMMAKV_TARGETS says it, and
// CMake has asked the assembler. They are inline assembly, so the functions
// that use them need not be compiled for another target.
#if defined(GEMMAKV_AVX_VNNI) && defined(__x86_64__)
#define GKV_HAVE_AVX_VNNI 1
#else
#define GKV_HAVE_AVX_VNNI 0
#endif
#if defined(GEMMAKV_AVX512_VNNI) && defined(__x86_64__)
#define GKV_HAVE_AVX512_VNNI 1
#else
#define GKV_HAVE_AVX512_VNNI 0
#endif
#define GKV_HAVE_BYTE_DOT (GKV_HAVE_AVX_VNNI || GKV_HAVE_AVX512_VNNI)

#endif  // GEMMAKV_OPS_BYTE_DOT_H_
