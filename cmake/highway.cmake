# Highway 1.2.0: the target gkv_hwy, whose compile definitions choose the SIMD
# targets for every translation unit that sees a Highway header.
#
# Its sources are fetched and built in. -DFETCHCONTENT_SOURCE_DIR_HIGHWAY=<dir>
# or -DGEMMAKV_HIGHWAY_ARCHIVE=<file> configure without any network;
# -DGEMMAKV_SYSTEM_HIGHWAY=ON takes an installed 1.2.0 instead.
include(FetchContent)
include("${CMAKE_CURRENT_LIST_DIR}/fetch_archive.cmake")

option(GEMMAKV_SYSTEM_HIGHWAY
  "Use an installed Highway 1.2.0 instead of building it in" OFF)
set(GEMMAKV_HIGHWAY_ARCHIVE "" CACHE FILEPATH
  "Archive of the Highway 1.2.0 sources (default: fetched)")
set(GEMMAKV_TARGETS "native" CACHE STRING
  "SIMD targets to build: native, all; for sanitizers best or least")
set_property(CACHE GEMMAKV_TARGETS PROPERTY STRINGS native all best least)

# The bits of results are known of one version alone.
function(_gkv_check_highway option version where)
  if(NOT version VERSION_EQUAL 1.2.0)
    message(FATAL_ERROR
      "${option}: found Highway ${version} in ${where}, expected 1.2.0")
  endif()
endfunction()

if(GEMMAKV_SYSTEM_HIGHWAY)
  find_package(hwy CONFIG QUIET)
  if(NOT hwy_FOUND)
    message(FATAL_ERROR
      "GEMMAKV_SYSTEM_HIGHWAY: found no installed Highway, expected 1.2.0")
  endif()
  _gkv_check_highway(GEMMAKV_SYSTEM_HIGHWAY "${hwy_VERSION}" "${hwy_DIR}")
  # Seen by the projects that add this one, too.
  set_property(TARGET hwy::hwy PROPERTY IMPORTED_GLOBAL ON)
  add_library(gkv_hwy INTERFACE)
  target_link_libraries(gkv_hwy INTERFACE hwy::hwy)
else()
  set(_gkv_archive "")
  if(NOT FETCHCONTENT_SOURCE_DIR_HIGHWAY)
    gkv_fetch_archive(_gkv_archive NAME highway OPTION GEMMAKV_HIGHWAY_ARCHIVE
      URL https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz
      SHA256 7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343
      DEBIAN trixie highway 1.2.0-2 highway_1.2.0.orig.tar.gz)
  endif()
  gkv_add_archive(highway "${_gkv_archive}" SOURCES_ONLY)
  # Another project may have declared the name first.
  file(STRINGS "${highway_SOURCE_DIR}/hwy/base.h" _gkv_version
    REGEX "^#define HWY_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "#define HWY_[A-Z]+ " "" _gkv_version "${_gkv_version}")
  string(REPLACE ";" "." _gkv_version "${_gkv_version}")
  _gkv_check_highway(FETCHCONTENT_SOURCE_DIR_HIGHWAY "${_gkv_version}"
    "${highway_SOURCE_DIR}")

  # All that kernels need besides headers. Our own target, and our own name for
  # the namespace: a program may have another Highway as well.
  add_library(gkv_hwy STATIC "${highway_SOURCE_DIR}/hwy/abort.cc"
    "${highway_SOURCE_DIR}/hwy/targets.cc")
  target_compile_definitions(gkv_hwy PUBLIC HWY_STATIC_DEFINE hwy=gkv_hwy)
  target_compile_features(gkv_hwy PUBLIC cxx_std_20)
  # System headers: our warnings are about our code.
  target_include_directories(gkv_hwy SYSTEM PUBLIC "${highway_SOURCE_DIR}")
endif()

# Sets `out` to the targets that `native` compiles beside the baseline, AVX2
# among them where the processor has it, and `out_dots` to the instructions of
# cpp/ops/byte_dot.h; to nothing where the compiler does not know the processor.
function(_gkv_native_targets out out_dots)
  set(${out} "" PARENT_SCOPE)
  set(${out_dots} "" PARENT_SCOPE)
  if(CMAKE_CROSSCOMPILING)
    return()
  endif()
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER} -march=native -dM -E -x c++ /dev/null
    OUTPUT_VARIABLE macros ERROR_QUIET)
  foreach(feature IN ITEMS SSE4_1 AVX2 AVXVNNI AVX512VL AVX512VNNI AVX512VBMI2
      AVX512BITALG VAES VPCLMULQDQ GFNI AVX512BF16 AVX512FP16)
    string(FIND "${macros}" "#define __${feature}__ 1" at)
    set(has_${feature} OFF)
    if(NOT at EQUAL -1)
      set(has_${feature} ON)
    endif()
  endforeach()
  if(NOT has_AVX2)
    if(has_SSE4_1)
      set(${out} HWY_SSE4 PARENT_SCOPE)
    endif()
    return()
  endif()
  # Highway asks for the same (hwy/targets.cc).
  if(has_AVX512VL AND has_AVX512VNNI AND has_AVX512VBMI2 AND has_AVX512BITALG
     AND has_VAES AND has_VPCLMULQDQ AND has_GFNI)
    set(best HWY_AVX3_DL)
    file(STRINGS /proc/cpuinfo amd REGEX AuthenticAMD LIMIT_COUNT 1)
    if(has_AVX512BF16 AND amd)
      set(best HWY_AVX3_ZEN4)
    elseif(has_AVX512BF16 AND has_AVX512FP16)
      set(best HWY_AVX3_SPR)
    endif()
    set(${out} HWY_AVX2 ${best} PARENT_SCOPE)
    return()
  endif()
  set(${out} HWY_AVX2 PARENT_SCOPE)
  if(has_AVXVNNI)
    set(${out_dots} AVX_VNNI PARENT_SCOPE)
  elseif(has_AVX512VL AND has_AVX512VNNI)
    set(${out_dots} AVX512_VNNI PARENT_SCOPE)
  endif()
endfunction()

# The baseline (SSE2) stays: without it Highway's baseline is scalar, where
# many operations do not compile.
#
# native: what this machine's processor takes, and AVX2, which most others can
# run: tests compare the two. Their results are the same bits.
#
# best: what this machine's processor takes alone; least: not even that.
#
# all: what any processor takes. Of the others, those that have no processor
# of their own generation any more, or that lack what the next one has (plain
# AVX-512 lacks VNNI), only cost build time. So do, where nothing multiplies
# bfloat16, those that have that and else what AVX3_DL has: there they take its
# kernels, which are the same instructions. gkv_bf16_targets() has the others.
set(_gkv_native "")
set(GKV_BYTE_DOTS "")
if(GEMMAKV_TARGETS MATCHES "^(native|best)$")
  _gkv_native_targets(_gkv_native GKV_BYTE_DOTS)
  if(NOT _gkv_native)
    message(STATUS
      "GEMMAKV_TARGETS: ${GEMMAKV_TARGETS} is not known here; building all")
  elseif(GEMMAKV_TARGETS STREQUAL "best")
    list(GET _gkv_native -1 _gkv_native)
  endif()
endif()
if(_gkv_native)
  set(_gkv_others HWY_SSSE3 HWY_SSE4 HWY_AVX2 HWY_AVX3 HWY_AVX3_DL
    HWY_AVX3_ZEN4 HWY_AVX3_SPR)
  list(REMOVE_ITEM _gkv_others ${_gkv_native})
  list(JOIN _gkv_others "|" _gkv_disabled)
  set(_gkv_disabled "(${_gkv_disabled})")
elseif(GEMMAKV_TARGETS MATCHES "^(native|best|all)$")
  set(_gkv_bf16_disabled "(HWY_SSSE3|HWY_AVX3)")
  set(_gkv_disabled "(HWY_SSSE3|HWY_AVX3|HWY_AVX3_ZEN4|HWY_AVX3_SPR)")
  set(GKV_BYTE_DOTS AVX_VNNI AVX512_VNNI)
elseif(GEMMAKV_TARGETS STREQUAL "least")
  set(_gkv_disabled "(HWY_SSSE3|HWY_SSE4|HWY_AVX2|HWY_AVX3|HWY_AVX3_DL|\
HWY_AVX3_ZEN4|HWY_AVX3_SPR)")
else()
  message(FATAL_ERROR
    "GEMMAKV_TARGETS is '${GEMMAKV_TARGETS}', expected native, all, best or "
    "least")
endif()
target_compile_definitions(gkv_hwy INTERFACE
  "HWY_DISABLED_TARGETS=${_gkv_disabled}" HWY_WANT_AVX3_DL=1)

# gkv_bf16_targets(<source>...): compiles sources for the targets that multiply
# bfloat16, too.
function(gkv_bf16_targets)
  if(DEFINED _gkv_bf16_disabled)
    set_property(SOURCE ${ARGV} APPEND PROPERTY COMPILE_OPTIONS
      -UHWY_DISABLED_TARGETS "-DHWY_DISABLED_TARGETS=${_gkv_bf16_disabled}")
  endif()
endfunction()
