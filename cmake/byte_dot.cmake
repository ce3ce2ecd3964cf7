# Whether the assembler knows the instructions of cpp/ops/byte_dot.h: binutils
# since 2.36 does, and Clang's own since 12.
include(CheckCXXSourceCompiles)
check_cxx_source_compiles([[
int main() {
  asm("{vex} vpdpbusd %ymm0, %ymm1, %ymm2");
  asm("{evex} vpdpbusd %ymm0, %ymm1, %ymm2");
}
]] GEMMAKV_HAS_BYTE_DOT)
if(GEMMAKV_HAS_BYTE_DOT)
  target_compile_definitions(gkv_ops PRIVATE GEMMAKV_BYTE_DOT=1)
endif()
