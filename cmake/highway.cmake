# Highway 1.2.0: the target hwy, whose compile definitions choose the SIMD
# targets for every translation unit that sees a Highway header.
#
# -DFETCHCONTENT_SOURCE_DIR_HIGHWAY=<dir> or -DGEMMAKV_HIGHWAY_ARCHIVE=<file>
# configure without any network.
include(FetchContent)
include("${CMAKE_CURRENT_LIST_DIR}/fetch_archive.cmake")

set(GEMMAKV_HIGHWAY_ARCHIVE "" CACHE FILEPATH
  "Archive of the Highway 1.2.0 sources (default: fetched)")
set(GEMMAKV_TARGETS "all" CACHE STRING
  "SIMD targets to build: all, or few for a quick build")
set_property(CACHE GEMMAKV_TARGETS PROPERTY STRINGS all few)

set(_gkv_archive "")
if(NOT FETCHCONTENT_SOURCE_DIR_HIGHWAY)
  gkv_fetch_archive(_gkv_archive NAME highway OPTION GEMMAKV_HIGHWAY_ARCHIVE
    URL https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz
    SHA256 7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343
    DEBIAN trixie highway 1.2.0-2 highway_1.2.0.orig.tar.gz)
endif()

# contrib alone would take minutes to build; its headers serve without.
foreach(_gkv_part CONTRIB EXAMPLES INSTALL TESTS)
  set(HWY_ENABLE_${_gkv_part} OFF CACHE BOOL "" FORCE)
endforeach()
set(HWY_FORCE_STATIC_LIBS ON CACHE BOOL "" FORCE)
gkv_add_archive(highway "${_gkv_archive}")

# The baseline (SSE2) stays: without it Highway's baseline is scalar, where
# many operations do not compile. Of the others, those that have no processor
# of their own generation any more, or that lack what the next one has (plain
# AVX-512 lacks VNNI), only cost build time.
if(GEMMAKV_TARGETS STREQUAL "all")
  set(_gkv_disabled "(HWY_SSSE3|HWY_AVX3)")
elseif(GEMMAKV_TARGETS STREQUAL "few")
  set(_gkv_disabled
    "(HWY_SSSE3|HWY_SSE4|HWY_AVX3|HWY_AVX3_ZEN4|HWY_AVX3_SPR)")
else()
  message(FATAL_ERROR
    "GEMMAKV_TARGETS is '${GEMMAKV_TARGETS}', expected all or few")
endif()
target_compile_definitions(hwy PUBLIC
  "HWY_DISABLED_TARGETS=${_gkv_disabled}" HWY_WANT_AVX3_DL=1)

# Our warnings are about our code.
get_target_property(_gkv_includes hwy INTERFACE_INCLUDE_DIRECTORIES)
set_property(TARGET hwy PROPERTY
  INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${_gkv_includes}")
