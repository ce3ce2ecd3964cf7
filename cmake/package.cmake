# What C++ projects link, with add_subdirectory or installed (component cpp):
# the target gemmakv::gemmakv, one archive of all layers and Highway. Its users
# see include/ and the C++ standard, nothing else of ours.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(_gkv_objects "")
foreach(_gkv_layer IN ITEMS base io ops cache store model engine api hwy)
  get_target_property(_gkv_type gkv_${_gkv_layer} TYPE)
  if(NOT _gkv_type STREQUAL "INTERFACE_LIBRARY")
    list(APPEND _gkv_objects $<TARGET_OBJECTS:gkv_${_gkv_layer}>)
  endif()
endforeach()
add_library(gemmakv STATIC ${_gkv_objects})
add_library(gemmakv::gemmakv ALIAS gemmakv)
set_property(TARGET gemmakv PROPERTY LINKER_LANGUAGE CXX)
target_compile_features(gemmakv PUBLIC cxx_std_20)
target_include_directories(gemmakv PUBLIC
  "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
  "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
# Private: only to be linked.
target_link_libraries(gemmakv PRIVATE Threads::Threads)
set(_gkv_dependencies "find_dependency(Threads)\n")
if(GEMMAKV_SYSTEM_HIGHWAY)
  target_link_libraries(gemmakv PRIVATE hwy::hwy)
  string(APPEND _gkv_dependencies "find_dependency(hwy 1.2.0 EXACT)\n")
endif()

set(_gkv_package "${CMAKE_INSTALL_LIBDIR}/cmake/gemmakv")
file(WRITE "${PROJECT_BINARY_DIR}/gemmakv-config.cmake"
  "include(CMakeFindDependencyMacro)\n"
  "${_gkv_dependencies}"
  "include(\"\${CMAKE_CURRENT_LIST_DIR}/gemmakv-targets.cmake\")\n")
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/gemmakv-config-version.cmake"
  COMPATIBILITY SameMinorVersion)
install(TARGETS gemmakv EXPORT gemmakv-targets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT cpp)
install(EXPORT gemmakv-targets NAMESPACE gemmakv::
  DESTINATION "${_gkv_package}" COMPONENT cpp)
install(FILES "${PROJECT_BINARY_DIR}/gemmakv-config.cmake"
  "${PROJECT_BINARY_DIR}/gemmakv-config-version.cmake"
  DESTINATION "${_gkv_package}" COMPONENT cpp)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/gemmakv"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT cpp)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE"
  DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT cpp)
if(NOT GEMMAKV_SYSTEM_HIGHWAY)
  install(FILES "${highway_SOURCE_DIR}/LICENSE"
    DESTINATION "${CMAKE_INSTALL_DOCDIR}" RENAME LICENSE-highway COMPONENT cpp)
endif()
