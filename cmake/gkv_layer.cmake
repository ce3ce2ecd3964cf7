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

# Compiles sources of a target `batch` at a time: most of a small one's time
# goes into headers that its neighbours read, too.
function(_gkv_unity target batch)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${GEMMAKV_UNITY}
    UNITY_BUILD_BATCH_SIZE ${batch})
endfunction()

# gkv_kernel_batch(<layer> <source>...): compiles sources of kernels together. Each
# by itself is included once for every SIMD target (hwy/foreach_target.h), and
# Highway with it; in a batch, which is included in their place, they share that.
# Names of the namespace of targets must differ.
function(gkv_kernel_batch layer)
  if(NOT GEMMAKV_UNITY)
    return()
  endif()
  list(JOIN ARGN "-" name)
  set(batch "${PROJECT_BINARY_DIR}/kernels/${name}.cc")
  set(text "#define GKV_KERNEL_BATCH\n#undef HWY_TARGET_INCLUDE\n")
  string(APPEND text "#define HWY_TARGET_INCLUDE \"${batch}\"\n"
    "#include \"hwy/foreach_target.h\"\n")
  foreach(source IN LISTS ARGN)
    set(path "${PROJECT_SOURCE_DIR}/cpp/${layer}/${source}.cc")
    set_source_files_properties("${path}" PROPERTIES HEADER_FILE_ONLY ON)
    string(APPEND text "#include \"${layer}/${source}.cc\"\n")
  endforeach()
  file(CONFIGURE OUTPUT "${batch}" CONTENT "${text}" @ONLY)
  target_sources(gkv_${layer} PRIVATE "${batch}")
endfunction()

# gkv_matmul_types(<type>...): compiles ops/matmul_type.cc for types of quantized
# weights, in one translation unit: they share what they read.
function(gkv_matmul_types)
  set_source_files_properties("${PROJECT_SOURCE_DIR}/cpp/ops/matmul_type.cc"
    PROPERTIES HEADER_FILE_ONLY ON)
  list(JOIN ARGN "-" name)
  set(unit "${PROJECT_BINARY_DIR}/kernels/matmul_${name}.cc")
  list(TRANSFORM ARGN REPLACE "(.+)" "GKV_MATMUL_KERNEL(\\1)"
    OUTPUT_VARIABLE kernels)
  list(JOIN kernels "; " kernels)
  file(CONFIGURE OUTPUT "${unit}" CONTENT
    "#define GKV_MATMUL_KERNELS ${kernels}\n#include \"ops/matmul_type.cc\"\n")
  if(GEMMAKV_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Calls instead of code at each access: it compiles in a third of the time.
    set_source_files_properties("${unit}" PROPERTIES COMPILE_OPTIONS
      "--param;asan-instrumentation-with-call-threshold=0")
  endif()
  target_sources(gkv_ops PRIVATE "${unit}")
endfunction()

# Flags of tests. What is tested is optimized; the test itself is compiled in two
# thirds of the time.
function(_gkv_test_flags target layer)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests/cpp")
  target_compile_definitions(${target} PRIVATE
    GEMMAKV_TEST_DATA_DIR="${PROJECT_SOURCE_DIR}/tests/golden")
  target_link_libraries(${target} PRIVATE gkv_${layer} gkv_warnings
    GTest::gtest_main)
  target_compile_options(${target} PRIVATE -O1)
  # What a test itself computes is not what is tested, but for the headers of the
  # lowest layers. Its memory is, everywhere: the core gets pointers into it.
  if(GEMMAKV_SANITIZE MATCHES "undefined" AND NOT layer MATCHES "^(base|io)$")
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  endif()
endfunction()

# Compiles the headers that nearly all tests read once for all of them, which is
# half the time of most: once for the layers that see Highway, since definitions
# come with it, and once for those below.
function(_gkv_share_headers target layer)
  set(owner_layer ops)
  if(layer MATCHES "^(base|io)$")
    set(owner_layer io)
  endif()
  set(owner gkv_${owner_layer}_test_headers)
  if(NOT TARGET ${owner})
    set(source "${PROJECT_BINARY_DIR}/test_headers.cc")
    if(NOT EXISTS "${source}")
      file(WRITE "${source}" "// Only the headers are wanted.\n")
    endif()
    add_library(${owner} OBJECT EXCLUDE_FROM_ALL "${source}")
    # Flags must be those of programs.
    set_target_properties(${owner} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${owner} PRIVATE ${CMAKE_CXX_COMPILE_OPTIONS_PIE})
    _gkv_test_flags(${owner} ${owner_layer})
    target_precompile_headers(${owner} PRIVATE <gtest/gtest.h> <algorithm>
      <array> <atomic> <chrono> <cmath> <condition_variable> <cstdint>
      <cstring> <filesystem> <fstream> <functional> <limits> <map> <memory>
      <mutex> <numeric> <optional> <random> <set> <span> <string>
      <string_view> <thread> <tuple> <utility> <variant> <vector>)
  endif()
  target_precompile_headers(${target} REUSE_FROM ${owner})
  # ccache needs it.
  target_compile_options(${target} PRIVATE
    $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
endfunction()

# gkv_test(<layer> <name>): tests/cpp/<layer>/<name>_test.cc, each of its
# cases a ctest named <layer>/<Suite>.<Case>; under sanitizers, where a process
# takes long to begin, all of them one ctest <layer>/<name>. A name may begin
# with folders.
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
  # Its object takes the place of the library's, which has no faults to reach.
  target_link_libraries(${target} PRIVATE gkv_fault_points)
  _gkv_test_flags(${target} ${layer})
  if(GEMMAKV_UNITY)
    _gkv_share_headers(${target} ${layer})
  endif()
  if(GEMMAKV_SANITIZE)
    add_test(NAME "${layer}/${name}" COMMAND ${target} --gtest_brief=1)
    set_tests_properties("${layer}/${name}" PROPERTIES TIMEOUT 900)
    return()
  endif()
  gtest_discover_tests(${target} TEST_PREFIX "${layer}/"
    DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 600)
endfunction()

# gkv_layer(<name> [UNITY <batch>] DEPENDS <layer or target>... SOURCES <name>...
#   [TESTS <name>...] [UNTESTED <name>...] [UNSANITIZED <name>...])
#
# The static library gkv_<name> of cpp/<name>/*.cc. Every source x comes with
# its twin test tests/cpp/<name>/x_test.cc, except those under UNTESTED, where
# a comment says why. TESTS are further tests: of headers without a source, or
# of several sources together. UNSANITIZED are not built under sanitizers: tests of
# functions of numbers, of the clock and of the machine, where those have nothing
# to find that they do not find in the tests of what uses them, and tests that
# cannot run there.
function(gkv_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "UNITY"
    "DEPENDS;SOURCES;TESTS;UNTESTED;UNSANITIZED")
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
  # Kernels include themselves, once for each target.
  set_target_properties(gkv_${name} PROPERTIES UNITY_BUILD OFF)
  if(arg_UNITY)
    _gkv_unity(gkv_${name} ${arg_UNITY})
  endif()
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
    if(GEMMAKV_SANITIZE AND test IN_LIST arg_UNSANITIZED)
      _gkv_declare("${PROJECT_SOURCE_DIR}/tests/cpp/${name}/${test}_test.cc")
    else()
      gkv_test(${name} ${test})
    endif()
  endforeach()
endfunction()

# gkv_python_module(<name> [UNITY <batch>] SOURCES <name>...): the extension module
# gemmakv.<name> of cpp/bindings/*.cc. Its tests are in tests/python.
function(gkv_python_module name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "UNITY" "SOURCES")
  set(sources ${arg_SOURCES})
  list(TRANSFORM sources PREPEND "${PROJECT_SOURCE_DIR}/cpp/bindings/")
  list(TRANSFORM sources APPEND ".cc")
  _gkv_declare(${sources})
  if(NOT GEMMAKV_BUILD_PYTHON)
    return()
  endif()
  find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
  # Without link-time optimization, which would redo the work on the kernels:
  # they are compiled for their targets already.
  Python_add_library(${name} MODULE WITH_SOABI ${sources})
  if(GEMMAKV_PYBIND11)
    target_include_directories(${name} SYSTEM PRIVATE "${GEMMAKV_PYBIND11}")
  else()
    find_package(pybind11 CONFIG REQUIRED)
    target_link_libraries(${name} PRIVATE pybind11::headers)
  endif()
  if(arg_UNITY)
    _gkv_unity(${name} ${arg_UNITY})
  endif()
  target_link_libraries(${name} PRIVATE gkv_engine gkv_padded gkv_warnings)
  target_compile_definitions(${name} PRIVATE
    GEMMAKV_VERSION="${PROJECT_VERSION}")
  install(TARGETS ${name} COMPONENT python LIBRARY DESTINATION gemmakv)
endfunction()
