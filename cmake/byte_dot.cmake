# Which instructions of cpp/ops/byte_dot.h are compiled: those that GEMMAKV_TARGETS
# asks for, if the assembler knows them: binutils since 2.36 does, and Clang's
# own since 12.
include(CheckCXXSourceCompiles)
if(GKV_BYTE_DOTS)
  check_cxx_source_compiles([[
int main() {
  asm("{vex} vpdpbusd %ymm0, %ymm1, %ymm2");
  asm("{evex} vpdpbusd %ymm0, %ymm1, %ymm2");
}
]] GEMMAKV_HAS_BYTE_DOT)
  if(GEMMAKV_HAS_BYTE_DOT)
    list(TRANSFORM GKV_BYTE_DOTS PREPEND GEMMAKV_)
    list(TRANSFORM GKV_BYTE_DOTS APPEND =1)
    target_compile_definitions(gkv_ops PRIVATE ${GKV_BYTE_DOTS})
  endif()
endif()
