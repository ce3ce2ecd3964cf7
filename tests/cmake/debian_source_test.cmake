# cmake -P: source entries that follow from those of a machine.
cmake_minimum_required(VERSION 3.22)
include("${CMAKE_CURRENT_LIST_DIR}/../../cmake/debian_source.cmake")

function(expect_equal what found expected)
  if(NOT "${found}" STREQUAL "${expected}")
    message(SEND_ERROR "${what}: found\n${found}\nexpected\n${expected}")
  endif()
endfunction()

set(plain "Types: deb-src
URIs: http://mirror.test/debian
Suites: trixie
Components: main
")

gkv_sources_from_deb822(found "Types: deb
# a comment; with [brackets]
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components: main contrib non-free-firmware
Signed-By: /usr/share/keyrings/debian.gpg

Types: deb
URIs: http://mirror.test/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian.gpg
" trixie)
expect_equal("main stanza only" "${found}"
  "${plain}Signed-By: /usr/share/keyrings/debian.gpg\n\n")

gkv_sources_from_deb822(found "types: deb deb-src
uris: http://mirror.test/debian
suites:
 bookworm
 bookworm-updates
components: main
enabled: yes
signed-by:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 a;b[c]
 -----END PGP PUBLIC KEY BLOCK-----" trixie)
expect_equal("continued fields, embedded key" "${found}"
  "${plain}Signed-By: 
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 a;b[c]
 -----END PGP PUBLIC KEY BLOCK-----

")

foreach(stanza IN ITEMS
    "Types: deb\nURIs: http://x.test/apt\nSuites: nodistro\nComponents: main"
    "Types: deb\nURIs: http://x.test/apt\nSuites: bookworm-pgdg\nComponents: main"
    "Types: deb\nURIs: http://x.test/apt\nSuites: bookworm\nComponents: stable"
    "Types: deb\nURIs: http://x.test/apt\nSuites: bookworm-updates\nComponents: main"
    "Types: deb\nURIs: http://x.test/apt\nSuites: bookworm\nComponents: main\nEnabled: no"
    "")
  gkv_sources_from_deb822(found "${stanza}" trixie)
  expect_equal("not Debian's own: ${stanza}" "${found}" "")
endforeach()

gkv_sources_from_one_line(found "# deb http://old.test/debian bookworm main
deb http://mirror.test/debian bookworm main non-free-firmware # ours
deb-src http://mirror.test/debian bookworm main
deb http://mirror.test/debian-security bookworm-security main
deb http://mirror.test/debian bookworm-updates main
deb https://x.test/apt cloud-sdk-bookworm main
" trixie)
expect_equal("one-line format" "${found}" "${plain}\n")

gkv_sources_from_one_line(found
  "deb [ arch=amd64 signed-by=/k/a.gpg,/k/b.gpg ] http://mirror.test/debian bookworm main"
  trixie)
expect_equal("one-line options" "${found}"
  "${plain}Signed-By: /k/a.gpg /k/b.gpg\n\n")

gkv_sources_from_one_line(found
  "deb [trusted=yes]  mirror+file:/etc/apt/mirrors.list  stable  contrib main" sid)
expect_equal("another suite" "${found}" "Types: deb-src
URIs: mirror+file:/etc/apt/mirrors.list
Suites: sid
Components: main
Trusted: yes

")
