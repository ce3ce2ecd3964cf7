# Source archives of dependencies, pinned by hash: a file the user names, the
# copy of an earlier configure, upstream, or Debian's source package.
include("${CMAKE_CURRENT_LIST_DIR}/debian_source.cmake")

function(_gkv_has_hash out file hashes)
  set(${out} OFF PARENT_SCOPE)
  if(EXISTS "${file}" AND NOT IS_DIRECTORY "${file}")
    file(SHA256 "${file}" found)
    if(found IN_LIST hashes)
      set(${out} ON PARENT_SCOPE)
    endif()
  endif()
endfunction()

# gkv_fetch_archive(<out> NAME <name> OPTION <variable> URL <url>
#   SHA256 <hash>... DEBIAN <suite> <package> <version> <file>)
#
# Sets <out> to a local archive whose SHA-256 is one of the given ones (more
# than one where Debian repacks upstream's files). The user's file, the value
# of <variable>, wins over all others. If there is none to be had, the error
# names <variable>.
function(gkv_fetch_archive out)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "NAME;OPTION;URL"
    "SHA256;DEBIAN")
  list(POP_FRONT arg_DEBIAN suite package version debian_file)
  set(dir "${FETCHCONTENT_BASE_DIR}/gemmakv-archives/${arg_NAME}")
  get_filename_component(file_name "${arg_URL}" NAME)
  set(kept "${dir}/${arg_NAME}-${file_name}")

  if(${arg_OPTION})
    get_filename_component(given "${${arg_OPTION}}" ABSOLUTE
      BASE_DIR "${CMAKE_SOURCE_DIR}")
    _gkv_has_hash(good "${given}" "${arg_SHA256}")
    if(NOT good)
      message(FATAL_ERROR "${arg_OPTION}: ${given} is not the archive of "
        "${arg_NAME}: expected a file with SHA-256 ${arg_SHA256}")
    endif()
    set(${out} "${given}" PARENT_SCOPE)
    return()
  endif()

  _gkv_has_hash(good "${kept}" "${arg_SHA256}")
  if(NOT good)
    message(STATUS "Fetching ${arg_NAME}")
    # Without EXPECTED_HASH a failure is a status, not an error with retries.
    file(DOWNLOAD "${arg_URL}" "${kept}" STATUS status
      INACTIVITY_TIMEOUT 15 TIMEOUT 120)
    list(JOIN status ": " upstream_error)
    _gkv_has_hash(good "${kept}" "${arg_SHA256}")
  endif()
  if(NOT good)
    message(STATUS "Fetching ${arg_NAME} from Debian's source package")
    set(work_dir "${dir}/debian")
    file(REMOVE "${kept}")
    file(REMOVE_RECURSE "${work_dir}")
    gkv_download_debian_source(debian_error "${work_dir}" ${suite} ${package}
      ${version})
    _gkv_has_hash(good "${work_dir}/${debian_file}" "${arg_SHA256}")
    if(good)
      file(RENAME "${work_dir}/${debian_file}" "${kept}")
      file(REMOVE_RECURSE "${work_dir}")
    elseif(NOT debian_error)
      set(debian_error "no ${debian_file} with the expected SHA-256")
    endif()
  endif()
  if(NOT good)
    list(JOIN arg_SHA256 " or " expected)
    message(FATAL_ERROR "Could not fetch ${arg_NAME}.\n"
      "  upstream: ${upstream_error}\n"
      "  Debian's source package ${package} ${version}: ${debian_error}\n"
      "Get ${arg_URL} (SHA-256 ${expected}) by other means and configure "
      "with -D${arg_OPTION}=/path/to/the/archive")
  endif()
  set(${out} "${kept}" PARENT_SCOPE)
endfunction()

# gkv_add_archive(<name> <archive> [SOURCES_ONLY]) unpacks and adds the project,
# out of the build of "all" and without installing anything of it. SOURCES_ONLY
# runs nothing of the project's own build.
macro(gkv_add_archive name archive)
  set(_gkv_declaration "")
  if(NOT "${archive}" STREQUAL "")  # else FETCHCONTENT_SOURCE_DIR_<NAME> is set
    file(SHA256 "${archive}" _gkv_hash)
    set(_gkv_declaration URL "${archive}" URL_HASH SHA256=${_gkv_hash})
  endif()
  if("${ARGN}" STREQUAL "SOURCES_ONLY")
    list(APPEND _gkv_declaration SOURCE_SUBDIR not-built)
  endif()
  FetchContent_Declare(${name} ${_gkv_declaration})
  FetchContent_MakeAvailable(${name})
  if(NOT "${ARGN}" STREQUAL "SOURCES_ONLY")
    set_property(DIRECTORY "${${name}_SOURCE_DIR}" PROPERTY EXCLUDE_FROM_ALL ON)
  endif()
endmacro()
