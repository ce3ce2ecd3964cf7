# cmake -P: what is installed is enough for a program of another project, and
# nothing of it is private.
cmake_minimum_required(VERSION 3.22)

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result
    OUTPUT_VARIABLE output ERROR_VARIABLE output)
  set(output "${output}" PARENT_SCOPE)
  if(NOT result EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}:\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE "${WORK}")
set(prefix "${WORK}/prefix")
run("${CMAKE_COMMAND}" --install "${BUILD}" --component cpp --prefix "${prefix}")

# Only headers of the public folder, all of them, and one archive.
file(GLOB public RELATIVE "${SOURCE}/include" "${SOURCE}/include/gemmakv/*")
file(GLOB_RECURSE installed RELATIVE "${prefix}/include" "${prefix}/include/*")
list(SORT public)
list(SORT installed)
if(NOT public OR NOT installed STREQUAL public)
  message(FATAL_ERROR "installed headers: ${installed}, expected ${public}")
endif()
file(GLOB_RECURSE archives RELATIVE "${prefix}" "${prefix}/*.a" "${prefix}/*.so")
if(NOT archives MATCHES "^lib[^;]*/libgemmakv\\.a$")
  message(FATAL_ERROR "installed libraries: ${archives}, expected libgemmakv.a")
endif()

# A project that finds the package and includes each public header alone. None
# of the core's other headers may be in reach of it.
set(project "${WORK}/headers")
list(FILTER public INCLUDE REGEX "\\.h$")
set(sources "")
foreach(header IN LISTS public)
  string(MAKE_C_IDENTIFIER "${header}" name)
  file(WRITE "${project}/${name}.cc" "#include <${header}>\n")
  list(APPEND sources "${name}.cc")
endforeach()
file(GLOB private RELATIVE "${SOURCE}/cpp" "${SOURCE}/cpp/*/*.h"
  "${SOURCE}/cpp/*/*/*.h")
set(checks "#if !__has_include(\"gemmakv/error.h\")\n#error public\n#endif\n")
foreach(header IN LISTS private)
  string(APPEND checks "#if __has_include(\"${header}\")\n#error ${header}\n#endif\n")
endforeach()
file(WRITE "${project}/private.cc" "${checks}")
list(JOIN sources " " sources)
file(WRITE "${project}/CMakeLists.txt" "\
cmake_minimum_required(VERSION 3.22)
project(headers LANGUAGES CXX)
find_package(gemmakv CONFIG REQUIRED)
add_library(headers STATIC private.cc ${sources})
target_link_libraries(headers PRIVATE gemmakv::gemmakv)
")

set(configuration -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}"
  "-DCMAKE_PREFIX_PATH=${prefix}" -DCMAKE_REQUIRE_FIND_PACKAGE_gemmakv=ON)
run("${CMAKE_COMMAND}" -S "${project}" -B "${project}/build" ${configuration})
run("${CMAKE_COMMAND}" --build "${project}/build")

# The example, built as its users build it.
set(example "${SOURCE}/examples/cpp/two_conversations")
run("${CMAKE_COMMAND}" -S "${example}" -B "${WORK}/example" ${configuration})
run("${CMAKE_COMMAND}" --build "${WORK}/example")
run("${WORK}/example/two_conversations")
if(NOT output MATCHES "restored and original continue alike")
  message(FATAL_ERROR "two_conversations printed\n${output}")
endif()
