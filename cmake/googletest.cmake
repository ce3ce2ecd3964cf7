# GoogleTest: the target GTest::gtest_main, for the tests only. An installed
# one serves (Debian: libgtest-dev, or the sources in googletest).
#
# -DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=<dir> or
# -DGEMMAKV_GOOGLETEST_ARCHIVE=<file> configure without any network.
include(FetchContent)
include("${CMAKE_CURRENT_LIST_DIR}/fetch_archive.cmake")

set(GEMMAKV_GOOGLETEST_ARCHIVE "" CACHE FILEPATH
  "Archive of the GoogleTest 1.16.0 sources (default: installed or fetched)")

if(NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST AND NOT GEMMAKV_GOOGLETEST_ARCHIVE)
  find_package(GTest QUIET)
  if(TARGET GTest::gtest_main)
    return()
  endif()
  if(EXISTS /usr/src/googletest/CMakeLists.txt)
    set(FETCHCONTENT_SOURCE_DIR_GOOGLETEST /usr/src/googletest)
  endif()
endif()

set(_gkv_archive "")
if(NOT FETCHCONTENT_SOURCE_DIR_GOOGLETEST)
  # Upstream's archive, then Debian's, which is repacked.
  gkv_fetch_archive(_gkv_archive NAME googletest
    OPTION GEMMAKV_GOOGLETEST_ARCHIVE
    URL https://github.com/google/googletest/archive/refs/tags/v1.16.0.tar.gz
    SHA256 78c676fc63881529bf97bf9d45948d905a66833fbfa5318ea2cd7478cb98f399
           2f54382b5d13d6cd0be2afc524f1e510d37f8ba78c2d439c5bea64ef37e30d01
    DEBIAN trixie googletest 1.16.0-1 googletest_1.16.0.orig.tar.gz)
endif()

set(BUILD_GMOCK OFF CACHE BOOL "" FORCE)
set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
gkv_add_archive(googletest "${_gkv_archive}")
if(NOT TARGET GTest::gtest_main)
  add_library(GTest::gtest_main ALIAS gtest_main)
endif()
