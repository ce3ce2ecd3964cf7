# cmake -DLOCK=<file> -P alone.cmake -- <command> <argument>...: runs the command
# when nobody else who asks for this file does.
cmake_minimum_required(VERSION 3.22)
file(LOCK "${LOCK}" GUARD PROCESS TIMEOUT 1400 RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${LOCK}: ${result}")
endif()
math(EXPR last "${CMAKE_ARGC} - 1")
set(command "")
foreach(i RANGE 5 ${last})
  list(APPEND command "${CMAKE_ARGV${i}}")
endforeach()
execute_process(COMMAND ${command} COMMAND_ERROR_IS_FATAL ANY)
