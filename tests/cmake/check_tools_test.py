"""The checks of the tree catch what they are there to catch, and the program
that runs the tests says what is wrong with its flags.
"""

import contextlib
import io
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import check_frames
import check_layers
import check_sources
import run_tests


class TreeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for layer in check_layers.BELOW:
            self.write(f"cpp/{layer}/x.h", "#include <vector>\n")

    def write(self, path, text):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def violations(self):
        return list(check_layers.violations(self.root))

    def test_every_pair_of_layers(self):
        order = [*check_layers.BELOW]
        for i, source in enumerate(order):
            for j, target in enumerate(order):
                with self.subTest(source=source, target=target):
                    include = f'#include "{target}/x.h"\n'
                    self.write(f"cpp/{source}/y.cc", include)
                    allowed = j <= i and {source, target} not in [
                        {"io", "ops"}, {"store", "model"}, {"api", "bindings"},
                        {"padded", "store"}, {"padded", "model"},
                        {"padded", "engine"}, {"padded", "api"},
                    ]  # fmt: skip
                    self.assertEqual(not self.violations(), allowed)
            (self.root / f"cpp/{source}/y.cc").unlink()

    def test_names_the_file_and_the_line(self):
        includes = '#include "base/x.h"\n  # include "ops/x.h"\n'
        self.write("cpp/io/y.cc", includes)
        self.assertEqual(
            self.violations(), ['cpp/io/y.cc:2: io must not include "ops/x.h"']
        )

    def test_highway_is_allowed_and_its_reinclusion_is_checked(self):
        self.write(
            "cpp/ops/y.cc",
            '#define HWY_TARGET_INCLUDE "ops/y.cc"\n#include "hwy/highway.h"\n',
        )
        self.assertEqual(self.violations(), [])
        self.write("cpp/ops/y.cc", '#define HWY_TARGET_INCLUDE "ops/z.cc"\n')
        self.assertEqual(len(self.violations()), 1)

    def test_only_bindings_know_python(self):
        self.write("cpp/bindings/y.cc", "#include <pybind11/pybind11.h>\n")
        self.assertEqual(self.violations(), [])
        self.write("cpp/engine/y.cc", "#include <pybind11/pybind11.h>\n")
        self.assertEqual(len(self.violations()), 1)

    def test_one_file_has_mutexes_of_the_standard_library(self):
        for name in ("mutex", "shared_mutex", "condition_variable"):
            line = f"  mutable std::{name} member_;\n"
            self.write("cpp/base/mutex.h", line)
            self.assertEqual(self.violations(), [])
            for path in ("cpp/base/y.cc", "cpp/cache/mutex.h"):
                with self.subTest(name=name, path=path):
                    self.write(path, line)
                    self.assertEqual(len(self.violations()), 1)
                    (self.root / path).unlink()

    def test_include_paths_start_at_cpp(self):
        self.write("cpp/base/y.cc", '#include "x.h"\n')
        self.assertEqual(len(self.violations()), 1)

    def test_every_layer_may_include_what_is_public(self):
        self.write("include/gemmakv/x.h", "#include <vector>\n")
        for layer in check_layers.BELOW:
            self.write(f"cpp/{layer}/y.cc", '#include "gemmakv/x.h"\n')
        self.assertEqual(self.violations(), [])
        self.write("cpp/base/y.cc", '#include "gemmakv/y.h"\n')
        self.assertEqual(len(self.violations()), 1)

    def test_public_headers_include_nothing_private(self):
        self.write("include/gemmakv/x.h", "#include <cstddef>\n")
        for line in [
            '#include "base/x.h"',
            '#include "gemmakv/y.h"',
            "#include <hwy/highway.h>",
            "#include <sys/types.h>",
            '#include "x.h"',
        ]:
            with self.subTest(line=line):
                self.write("include/gemmakv/z.h", f"{line}\n")
                self.assertEqual(len(self.violations()), 1)
        self.write("include/gemmakv/z.h", '#include "gemmakv/x.h"\n')
        self.assertEqual(self.violations(), [])
        self.write("include/other/z.h", "")
        self.assertEqual(len(self.violations()), 1)

    def test_unknown_layer(self):
        self.write("cpp/util/y.h", "")
        self.assertEqual(len(self.violations()), 1)

    def test_undeclared_sources(self):
        self.write("cpp/base/a.cc", "")
        self.write("tests/cpp/base/a_test.cc", "")
        declared = ["cpp/base/a.cc", "tests/cpp/base/a_test.cc"]
        self.assertEqual(check_sources.undeclared(self.root, declared), [])
        self.assertEqual(
            check_sources.undeclared(self.root, declared[:1]), declared[1:]
        )

    def test_system_includes(self):
        self.assertEqual(list(check_sources.system_includes(self.root)), [])
        for header in ("sys/stat.h", "fcntl.h", "unistd.h", "pthread.h"):
            line = f"# include <{header}>\n"
            with self.subTest(header=header):
                self.write("cpp/io/y.cc", line)
                self.write("cpp/base/processors.h", line)
                self.write("cpp/store/y.cc", f"#include <map>\n{line}")
                self.write("cpp/base/process_two.h", line)
                found = list(check_sources.system_includes(self.root))
                self.assertEqual(
                    [text.split(" ")[0] for text in found],
                    ["cpp/base/process_two.h:1:", "cpp/store/y.cc:2:"],
                )
        for others in ('"base/x.h"', "<pybind11/stl.h>", "<cerrno>"):
            self.write("cpp/store/y.cc", f"#include {others}\n")
            self.write("cpp/base/process_two.h", "")
            self.assertEqual(list(check_sources.system_includes(self.root)), [])

    def test_frames_of_functions(self):
        lines = [
            "0000000000000010 <gkv::Small(int)>:\n",
            "  10:\tsub    $0x28,%rsp\n",
            "  20:\tsub    $0xffffffffffffff80,%rsp\n",
            "0000000000000030 <gkv::Large()>:\n",
            "  30:\tpush   %rbp\n",
            "  31:\tsub    $0x2c038,%rsp\n",
            "0000000000000040 <gkv::Probed()>:\n",
            "  40:\tlea    -0x8000(%rsp),%r11\n",
            "  48:\tsub    $0x1000,%rsp\n",
            "0000000000000050 <gkv::None()>:\n",
            "  50:\tret\n",
        ]
        self.assertEqual(
            list(check_frames.frames(lines)),
            [
                ("gkv::Small(int)", 0x28),
                ("gkv::Large()", 0x2C038),
                ("gkv::Probed()", 0x8000),
            ],
        )


class RunTestsTest(unittest.TestCase):
    def test_wrong_flags_are_one_line(self):
        cases = {
            ("--jobs", "0"): ["at least 1", "'0'"],
            ("--jobs", "many"): ["at least 1", "'many'"],
            ("--only", "no/thing"): ["LAYER/NAME_test.cc", "'no/thing'"],
            ("--fast", "--only", "base/hash"): ["--only", "--fast", "pytest"],
            ("--preset", "none"): ["release", "'none'"],
        }
        for flags, words in cases.items():
            with (
                self.subTest(flags=flags),
                contextlib.redirect_stderr(io.StringIO()) as said,
                self.assertRaises(SystemExit),
            ):
                run_tests.parse(flags)
            for word in words:
                self.assertIn(word, said.getvalue().splitlines()[-1])

    def test_one_run_at_a_time_builds_in_a_folder(self):
        program = (
            "import sys, pathlib, run_tests\n"
            "with run_tests.alone_in(pathlib.Path(sys.argv[1])): print('in')"
        )
        with tempfile.TemporaryDirectory() as folder:
            with run_tests.alone_in(Path(folder)):
                other = subprocess.Popen(
                    [sys.executable, "-c", program, folder],
                    cwd=Path(run_tests.__file__).parent,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                self.assertIn("another run builds", other.stdout.readline())
                self.assertIsNone(other.poll())
            self.assertEqual(other.communicate()[0], "in\n")


if __name__ == "__main__":
    unittest.main()
