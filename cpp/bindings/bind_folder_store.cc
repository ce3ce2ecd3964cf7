#include <pybind11/stl.h>

#include <string>

#include "bindings/bindings.h"
#include "store/folder_store.h"

namespace gkv {
namespace {

constexpr const char* kObjectKinds[] = {"page", "window page", "resume point"};

py::object SecondsOf(int64_t ns) {
  if (ns == 0) return py::none();
  return py::float_(static_cast<double>(ns) * 1e-9);
}

std::string HexOf(std::span<const uint8_t> bytes) {
  std::string hex;
  for (const uint8_t byte : bytes) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

py::dict Describe(const std::string& path) {
  FolderReport report;
  {
    const GilReleased no_gil;
    report = DescribeFolder(path);
  }
  uint64_t entries = 0, bytes = 0;
  py::list groups;
  for (const FolderReport::Group& group : report.groups) {
    py::dict one;
    one["salt"] = HexOf(group.salt);
    one["kind"] = kObjectKinds[static_cast<size_t>(group.kind) - 1];
    one["entries"] = group.entries;
    one["bytes"] = group.bytes;
    groups.append(one);
    entries += group.entries;
    bytes += group.bytes;
  }
  py::dict all;
  all["file_system"] = report.file_system;
  all["entries"] = entries;
  all["bytes"] = bytes;
  all["temporary_files"] = report.temporary_files;
  all["oldest"] = SecondsOf(report.oldest_ns);
  all["newest"] = SecondsOf(report.newest_ns);
  all["groups"] = groups;
  return all;
}

py::dict Sweep(FolderStore& store) {
  SweepResult result;
  {
    const GilReleased no_gil;
    result = store.Sweep();
  }
  py::dict all;
  all["swept"] = result.swept;
  all["removed"] = result.removed;
  all["removed_bytes"] = result.removed_bytes;
  all["removed_temporary_files"] = result.removed_temporary;
  all["entries"] = result.entries;
  all["bytes"] = result.bytes;
  return all;
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
                  "What is in a folder; makes nothing.");
}

}  // namespace gkv
