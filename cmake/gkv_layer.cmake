# Declares the C++ sources. Whatever is declared here is also written to
# declared_sources.txt in the build directory, which a test compares with the
# files on disk: a source or test that no one builds fails that test.
include(GoogleTest)

function(_gkv_declare)
  foreach(path IN LISTS ARGV)
    cmake_path(RELATIVE_PATH path BASE_DIRECTORY "${PROJECT_SOURCE_DIR}")
    set_property(GLOBAL APPEND PROPERTY GKV_DECLARED_SOURCES "${path}")
  endforeach()
endfunction()

function(gkv_write_declared_sources)
  get_property(paths GLOBAL PROPERTY GKV_DECLARED_SOURCES)
  list(JOIN paths "\n" text)
  file(WRITE "${PROJECT_BINARY_DIR}/declared_sources.txt" "${text}\n")
endfunction()

# gkv_test(<layer> <name>): tests/cpp/<layer>/<name>_test.cc, each of its
# cases a ctest named <layer>/<Suite>.<Case>. A name may begin with folders.
function(gkv_test layer name)
  set(source "${PROJECT_SOURCE_DIR}/tests/cpp/${layer}/${name}_test.cc")
  _gkv_declare("${source}")
  if(NOT GEMMAKV_BUILD_TESTS)
    return()
  endif()
  if(NOT EXISTS "${source}")
    message(FATAL_ERROR "${source} is missing: every source has a twin test, "
      "or stands under UNTESTED with the reason")
  endif()
  string(REPLACE "/" "_" target "${layer}_${name}_test")
  add_executable(${target} "${source}")
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests/cpp")
  target_compile_definitions(${target} PRIVATE
    GEMMAKV_TEST_DATA_DIR="${PROJECT_SOURCE_DIR}/tests/golden")
  # Its object takes the place of the library's, which has no faults to reach.
  target_link_libraries(${target} PRIVATE gkv_fault_points gkv_${layer}
    gkv_warnings GTest::gtest_main)
  # What is tested is optimized; the test itself is compiled in two thirds of
  # the time.
  target_compile_options(${target} PRIVATE -O1)
  gtest_discover_tests(${target} TEST_PREFIX "${layer}/"
    DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 600)
endfunction()

# gkv_layer(<name> DEPENDS <layer or target>... SOURCES <name>...
#   [TESTS <name>...] [UNTESTED <name>...])
#
# The static library gkv_<name> of cpp/<name>/*.cc. Every source x comes with
# its twin test tests/cpp/<name>/x_test.cc, except those under UNTESTED, where
# a comment says why. TESTS are further tests: of headers without a source, or
# of several sources together.
function(gkv_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "DEPENDS;SOURCES;TESTS;UNTESTED")
  set(sources ${arg_SOURCES})
  list(TRANSFORM sources PREPEND "${PROJECT_SOURCE_DIR}/cpp/${name}/")
  list(TRANSFORM sources APPEND ".cc")
  _gkv_declare(${sources})

  set(libraries "")
  foreach(dependency IN LISTS arg_DEPENDS)
    if(TARGET gkv_${dependency})
      set(dependency gkv_${dependency})
    endif()
    list(APPEND libraries ${dependency})
  endforeach()
  add_library(gkv_${name} STATIC ${sources})
  target_link_libraries(gkv_${name} PUBLIC gkv_options ${libraries}
    PRIVATE $<BUILD_INTERFACE:gkv_warnings>)

  set(tests ${arg_SOURCES})
  foreach(exception IN LISTS arg_UNTESTED)
    if(NOT exception IN_LIST arg_SOURCES)
      message(FATAL_ERROR "${name}: UNTESTED ${exception} is not a source")
    endif()
    list(REMOVE_ITEM tests ${exception})
  endforeach()
  foreach(test IN LISTS tests arg_TESTS)
    gkv_test(${name} ${test})
  endforeach()
endfunction()

# gkv_python_module(<name> SOURCES <name>...): the extension module
# gemmakv.<name> of cpp/bindings/*.cc. Its tests are in tests/python.
function(gkv_python_module name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  set(sources ${arg_SOURCES})
  list(TRANSFORM sources PREPEND "${PROJECT_SOURCE_DIR}/cpp/bindings/")
  list(TRANSFORM sources APPEND ".cc")
  _gkv_declare(${sources})
  if(NOT GEMMAKV_BUILD_PYTHON)
    return()
  endif()
  find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
  find_package(pybind11 CONFIG REQUIRED)
  # NO_EXTRAS: link-time optimization would redo the work on the kernels, which
  # are compiled for their targets already.
  pybind11_add_module(${name} MODULE NO_EXTRAS ${sources})
  target_link_libraries(${name} PRIVATE gkv_engine gkv_warnings)
  target_compile_definitions(${name} PRIVATE
    GEMMAKV_VERSION="${PROJECT_VERSION}")
  install(TARGETS ${name} COMPONENT python LIBRARY DESTINATION gemmakv)
endfunction()
