#include <pybind11/stl.h>

#include <string>

#include "base/hex.h"
#include "bindings/bindings.h"
#include "store/folder_store.h"

namespace gkv {
namespace {

constexpr const char* kObjectKinds[] = {"page", "window page", "resume point"};

py::object SecondsOf(int64_t ns) {
  if (ns == 0) return py::none();
  return py::float_(static_cast<double>(ns) * 1e-9);
}

py::dict Describe(const std::string& path) {
  const FolderReport report = WithoutGil([&] { return DescribeFolder(path); });
  uint64_t entries = 0, bytes = 0;
  py::list groups;
  for (const FolderReport::Group& group : report.groups) {
    groups.append(
        py::dict("salt"_a = ToHex(group.salt),
                 "kind"_a = kObjectKinds[static_cast<size_t>(group.kind) - 1],
                 "entries"_a = group.entries, "bytes"_a = group.bytes));
    entries += group.entries;
    bytes += group.bytes;
  }
  return py::dict(
      "file_system"_a = report.file_system, "entries"_a = entries,
      "bytes"_a = bytes, "temporary_files"_a = report.temporary_files,
      "oldest"_a = SecondsOf(report.oldest_ns),
      "newest"_a = SecondsOf(report.newest_ns), "groups"_a = groups);
}

py::dict Sweep(FolderStore& store) {
  const SweepResult result = WithoutGil([&] { return store.Sweep(); });
  return py::dict("swept"_a = result.swept, "removed"_a = result.removed,
                  "removed_bytes"_a = result.removed_bytes,
                  "removed_temporary_files"_a = result.removed_temporary,
                  "entries"_a = result.entries, "bytes"_a = result.bytes);
}

}  // namespace

void RegisterFolderStore(py::module_& module) {
  py::class_<FolderStore, BlockStore, std::shared_ptr<FolderStore>>(
      module, "FolderStore")
      .def(py::init([](const std::string& path, const std::string& tier,
                       bool mapped, uint64_t budget_bytes) {
             const GilReleased no_gil;
             return OpenFolderStore(path, {tier, mapped, budget_bytes});
           }),
           py::arg("path"), py::kw_only(), py::arg("tier"), py::arg("mapped"),
           py::arg("budget_bytes"))
      .def_property_readonly("budget_bytes", &FolderStore::budget_bytes)
      .def("sweep", &Sweep)
      .def_static("describe", &Describe, py::arg("path"),
                  "Describes what is in a folder, and makes nothing there.");
}

}  // namespace gkv
