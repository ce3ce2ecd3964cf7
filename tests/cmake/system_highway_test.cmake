# cmake -P: an installed Highway is taken on request, if it is 1.2.0.
cmake_minimum_required(VERSION 3.22)
file(REMOVE_RECURSE "${WORK}")

# configure(<name> <version>): with an installed Highway that says to be of this
# version; none if it is empty.
function(configure name version)
  set(package "${WORK}/${name}/prefix/lib/cmake/hwy")
  if(version)
    file(WRITE "${package}/hwy-config.cmake" "\
add_library(hwy::hwy INTERFACE IMPORTED)
target_include_directories(hwy::hwy INTERFACE \"${HIGHWAY}\")
")
    file(WRITE "${package}/hwy-config-version.cmake"
      "set(PACKAGE_VERSION ${version})\n")
  endif()
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${WORK}/${name}/build"
      -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}"
      "-Dhwy_DIR=${package}" -DGEMMAKV_SYSTEM_HIGHWAY=ON
      -DGEMMAKV_BUILD_TESTS=OFF -DGEMMAKV_BUILD_PYTHON=OFF
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  set(result "${result}" PARENT_SCOPE)
  set(output "${output}" PARENT_SCOPE)
endfunction()

configure(same 1.2.0)
if(NOT result EQUAL 0)
  message(SEND_ERROR "1.2.0 was refused: ${output}")
endif()
foreach(version IN ITEMS 1.1.0 1.2.1 1.3.0)
  configure(other ${version})
  if(result EQUAL 0 OR NOT output MATCHES
     "GEMMAKV_SYSTEM_HIGHWAY: found Highway ${version} in [^ ]*, expected 1.2.0")
    message(SEND_ERROR "${version} was not refused: ${output}")
  endif()
endforeach()
