# Upstream archives out of Debian source packages, for machines that reach
# package mirrors only. Needs apt-get but no root: it works on a source list,
# lists and a cache of its own, and leaves those of the machine untouched.

# Suites of Debian itself; third-party archives name theirs otherwise or are
# weeded out by the hash of what they deliver.
set(_gkv_debian_suite
  "(oldoldstable|oldstable|stable|testing|unstable|sid|buster|bullseye|bookworm|trixie|forky|duke)")

# Text that is made of list items and brackets survives CMake lists only in
# disguise: sets `out` to a list of the lines of `text`, with ; [ ] escaped.
function(_gkv_lines out text)
  string(REPLACE ";" "<semicolon>" text "${text}")
  string(REPLACE "[" "<open>" text "${text}")
  string(REPLACE "]" "<close>" text "${text}")
  string(REGEX REPLACE "\r?\n" ";" text "${text}")
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

function(_gkv_unescape out text)
  string(REPLACE "<semicolon>" ";" text "${text}")
  string(REPLACE "<open>" "[" text "${text}")
  string(REPLACE "<close>" "]" text "${text}")
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

# One deb822 stanza, or nothing unless `suites` has a release of Debian and
# `components` has main. Security and updates suites do not count.
function(_gkv_source_stanza out suite uris suites components extra)
  set(${out} "" PARENT_SCOPE)
  if(uris AND " ${suites} " MATCHES "[ \t]${_gkv_debian_suite}/?[ \t]"
     AND " ${components} " MATCHES "[ \t]main[ \t]")
    set(${out} "Types: deb-src\nURIs: ${uris}\nSuites: ${suite}\nComponents: main\n${extra}\n"
      PARENT_SCOPE)
  endif()
endfunction()

# Sets `out` to the source entries for `suite` that follow from `text`, the
# content of a file in deb822 format (debian.sources).
function(gkv_sources_from_deb822 out text suite)
  _gkv_lines(lines "${text}\n\nend-of-text:")
  set(result "")
  set(field "")
  foreach(name types uris suites components signed-by trusted enabled)
    set(value_${name} "")
  endforeach()
  foreach(line IN LISTS lines)
    if(line MATCHES "^#")
      continue()
    elseif(line MATCHES "^[ \t]+[^ \t]" AND field)  # continues the field
      string(APPEND value_${field} "\n${line}")
    elseif(line MATCHES "^([A-Za-z0-9-]+)[ \t]*:[ \t]*(.*)$")
      string(TOLOWER "${CMAKE_MATCH_1}" field)
      set(value_${field} "${CMAKE_MATCH_2}")
    elseif(line MATCHES "^[ \t]*$")  # end of a stanza
      set(extra "")
      if(value_signed-by)
        string(APPEND extra "Signed-By: ${value_signed-by}\n")
      endif()
      if(value_trusted)
        string(APPEND extra "Trusted: ${value_trusted}\n")
      endif()
      if(value_types MATCHES "deb" AND NOT value_enabled STREQUAL "no")
        string(REGEX REPLACE "[ \t\n]+" " " uris "${value_uris}")
        string(REGEX REPLACE "[ \t\n]+" " " suites "${value_suites}")
        string(REGEX REPLACE "[ \t\n]+" " " parts "${value_components}")
        _gkv_source_stanza(stanza "${suite}" "${uris}" "${suites}" "${parts}"
          "${extra}")
        string(APPEND result "${stanza}")
      endif()
      set(field "")
      foreach(name types uris suites components signed-by trusted enabled)
        set(value_${name} "")
      endforeach()
    endif()
  endforeach()
  _gkv_unescape(result "${result}")
  set(${out} "${result}" PARENT_SCOPE)
endfunction()

# The same for the one-line format (sources.list).
function(gkv_sources_from_one_line out text suite)
  _gkv_lines(lines "${text}")
  set(result "")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "#.*$" "" line "${line}")
    if(NOT line MATCHES
       "^[ \t]*deb(-src)?[ \t]+(<open>(.*)<close>[ \t]*)?([^ \t<]+)[ \t]+([^ \t]+)[ \t]+(.*)$")
      continue()
    endif()
    set(options "${CMAKE_MATCH_3}")
    set(uri "${CMAKE_MATCH_4}")
    set(line_suite "${CMAKE_MATCH_5}")
    set(components "${CMAKE_MATCH_6}")
    set(extra "")
    if(options MATCHES "signed-by=([^ \t]+)")
      string(REPLACE "," " " keys "${CMAKE_MATCH_1}")
      string(APPEND extra "Signed-By: ${keys}\n")
    endif()
    if(options MATCHES "trusted=([^ \t]+)")
      string(APPEND extra "Trusted: ${CMAKE_MATCH_1}\n")
    endif()
    _gkv_source_stanza(stanza "${suite}" "${uri}" "${line_suite}"
      "${components}" "${extra}")
    string(FIND "${result}" "${stanza}" seen)  # deb and deb-src name it twice
    if(seen EQUAL -1)
      string(APPEND result "${stanza}")
    endif()
  endforeach()
  _gkv_unescape(result "${result}")
  set(${out} "${result}" PARENT_SCOPE)
endfunction()

# Sets `out` to the entries for `suite` that follow from all source lists of
# this machine; empty on a machine that is not Debian.
function(gkv_machine_sources out suite)
  set(result "")
  file(GLOB deb822_files /etc/apt/sources.list.d/*.sources)
  foreach(path IN LISTS deb822_files)
    file(READ "${path}" text)
    gkv_sources_from_deb822(part "${text}" "${suite}")
    string(APPEND result "${part}")
  endforeach()
  file(GLOB one_line_files /etc/apt/sources.list /etc/apt/sources.list.d/*.list)
  foreach(path IN LISTS one_line_files)
    file(READ "${path}" text)
    gkv_sources_from_one_line(part "${text}" "${suite}")
    string(APPEND result "${part}")
  endforeach()
  set(${out} "${result}" PARENT_SCOPE)
endfunction()

# Downloads the source package `package`=`version` of `suite` into `work_dir`.
# Sets `out_error` to nothing, or to what went wrong. What arrived is for the
# caller to verify.
function(gkv_download_debian_source out_error work_dir suite package version)
  set(${out_error} "" PARENT_SCOPE)
  find_program(GEMMAKV_APT_GET apt-get)
  mark_as_advanced(GEMMAKV_APT_GET)
  if(NOT GEMMAKV_APT_GET)
    set(${out_error} "there is no apt-get" PARENT_SCOPE)
    return()
  endif()
  gkv_machine_sources(sources "${suite}")
  if(NOT sources)
    set(${out_error} "apt knows no Debian mirror" PARENT_SCOPE)
    return()
  endif()
  file(MAKE_DIRECTORY "${work_dir}/lists/partial"
    "${work_dir}/cache/archives/partial")
  file(WRITE "${work_dir}/debian.sources" "${sources}")
  # Hooks that the machine runs after an update concern its own lists.
  file(WRITE "${work_dir}/apt.conf" "\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
APT::Sandbox::User \"\";
Acquire::Languages \"none\";
Acquire::Retries \"2\";
Acquire::http::Timeout \"30\";
Acquire::https::Timeout \"30\";
Dir::Etc::sourcelist \"${work_dir}/debian.sources\";
Dir::Etc::sourceparts \"/dev/null\";
Dir::State \"${work_dir}\";
Dir::State::lists \"${work_dir}/lists\";
Dir::Cache \"${work_dir}/cache\";
")
  # The update's own result says nothing: one of several mirrors may be down.
  foreach(step "update" "source;--download-only;${package}=${version}")
    execute_process(
      COMMAND ${CMAKE_COMMAND} -E env LC_ALL=C
        ${GEMMAKV_APT_GET} -c "${work_dir}/apt.conf" -q ${step}
      WORKING_DIRECTORY "${work_dir}"
      INPUT_FILE /dev/null
      TIMEOUT 300
      RESULT_VARIABLE result
      OUTPUT_VARIABLE output
      ERROR_VARIABLE output)
    file(APPEND "${work_dir}/apt.log" "${output}\n")
  endforeach()
  if(NOT result EQUAL 0)
    set(${out_error} "apt-get failed, see ${work_dir}/apt.log" PARENT_SCOPE)
  endif()
endfunction()
