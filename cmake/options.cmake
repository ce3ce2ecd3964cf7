# Options of the build, and how translation units are compiled: ours through
# gkv_options and gkv_warnings, those of the dependencies too where it says so.

option(GEMMAKV_BUILD_PYTHON "Build the Python module" OFF)
option(GEMMAKV_BUILD_TESTS "Build the C++ tests" ${PROJECT_IS_TOP_LEVEL})
set(GEMMAKV_PYBIND11 "" CACHE PATH
  "Folder of pybind11's headers (default: its package is looked for)")
option(GEMMAKV_BUILD_BENCHMARKS "Build the kernels' benchmarks" OFF)
option(GEMMAKV_UNITY
  "Compile sources of a layer in batches, and what tests include once" ON)
option(GEMMAKV_WERROR "Warnings are errors" OFF)
set(GEMMAKV_SANITIZE "" CACHE STRING
  "Sanitizers for all code: address,undefined or thread")

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE
   AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# Of the dependencies too: all of it ends up in one Python module.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

if(GEMMAKV_SANITIZE)
  # An address outside its object that nothing reads does no harm; checking
  # each one takes a quarter of the time of compiling a kernel. So do the checks
  # of what is read through null and outside of objects, which AddressSanitizer
  # tells of, too.
  add_compile_options(-fsanitize=${GEMMAKV_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize=pointer-overflow,null,object-size -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${GEMMAKV_SANITIZE})
endif()

if(NOT TARGET Threads::Threads)
  find_package(Threads REQUIRED)
  # Seen by the projects that add this one, too.
  set_property(TARGET Threads::Threads PROPERTY IMPORTED_GLOBAL ON)
endif()

# Our own code. Contraction would let the compiler decide, per call site,
# whether a product and a sum round once or twice; results must not depend on
# that.
add_library(gkv_options INTERFACE)
target_compile_features(gkv_options INTERFACE cxx_std_20)
target_compile_options(gkv_options INTERFACE -ffp-contract=off)
target_include_directories(gkv_options INTERFACE
  "${PROJECT_SOURCE_DIR}/cpp" "${PROJECT_SOURCE_DIR}/include")

# Kept apart from gkv_options, which reaches the code of our users.
add_library(gkv_warnings INTERFACE)
target_compile_options(gkv_warnings INTERFACE -Wall -Wextra
  $<$<BOOL:${GEMMAKV_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 warns so of std::string's own copies where it optimizes.
  target_compile_options(gkv_warnings INTERFACE
    $<$<BOOL:${GEMMAKV_WERROR}>:-Wno-error=restrict>)
endif()
