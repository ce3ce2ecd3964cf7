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
set(GEMMAKV_TARGETS "all" CACHE STRING
  "SIMD targets to build: all, few for a quick build, or least for threads")
set_property(CACHE GEMMAKV_TARGETS PROPERTY STRINGS all few least)

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

# The baseline (SSE2) stays: without it Highway's baseline is scalar, where
# many operations do not compile. Of the others, those that have no processor
# of their own generation any more, or that lack what the next one has (plain
# AVX-512 lacks VNNI), only cost build time. So do, where nothing multiplies
# bfloat16, those that have that and else what AVX3_DL has: there they take its
# kernels, which are the same instructions. gkv_bf16_targets() has the others.
if(GEMMAKV_TARGETS STREQUAL "all")
  set(_gkv_bf16_disabled "(HWY_SSSE3|HWY_AVX3)")
  set(_gkv_disabled "(HWY_SSSE3|HWY_AVX3|HWY_AVX3_ZEN4|HWY_AVX3_SPR)")
elseif(GEMMAKV_TARGETS STREQUAL "few")
  # Of AVX-512 the kernels that this machine's processor would take: they
  # differ where it multiplies bfloat16.
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER} -march=native -dM -E -x c++ /dev/null
    OUTPUT_VARIABLE _gkv_macros ERROR_QUIET)
  if(_gkv_macros MATCHES "__AVX512BF16__")
    set(_gkv_disabled
      "(HWY_SSSE3|HWY_SSE4|HWY_AVX3|HWY_AVX3_DL|HWY_AVX3_SPR)")
  else()
    set(_gkv_disabled
      "(HWY_SSSE3|HWY_SSE4|HWY_AVX3|HWY_AVX3_ZEN4|HWY_AVX3_SPR)")
  endif()
elseif(GEMMAKV_TARGETS STREQUAL "least")
  set(_gkv_disabled "(HWY_SSSE3|HWY_SSE4|HWY_AVX3|HWY_AVX3_DL|\
HWY_AVX3_ZEN4|HWY_AVX3_SPR)")
else()
  message(FATAL_ERROR
    "GEMMAKV_TARGETS is '${GEMMAKV_TARGETS}', expected all, few or least")
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
