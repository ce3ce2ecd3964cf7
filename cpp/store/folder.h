#ifndef GEMMAKV_STORE_FOLDER_H_
#define GEMMAKV_STORE_FOLDER_H_

#include <array>
#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "io/file.h"
#include "store/address.h"
#include "store/block_store.h"

// The folders of docs/internals/block-store-format.md: how they are opened, how
// their files are named, and how a file appears.

namespace gkv {

inline constexpr std::string_view kTemporaryPrefix = ".tmp-";

// The parts of the name of an object's file.
struct FileName {
  ObjectName name;
  ObjectName parent;  // the object that it hangs on
  uint64_t end = 0;
  std::array<uint8_t, 8> salt{};  // the beginning of the salt's digest
  ObjectKind kind = ObjectKind::kPage;

  auto operator<=>(const FileName&) const = default;

  std::string Text() const;
  // The name of its subfolder: two hex digits.
  std::string Subfolder() const;
  std::string Path() const { return Subfolder() + "/" + Text(); }
  // Whether its parent is an object, not a root or nothing.
  bool HangsOnObject() const;
  // Accepts exactly what Text() returns.
  static std::optional<FileName> Parse(std::string_view text);
};

// A folder that was checked when it was opened. All calls act on that folder,
// wherever its path leads by now. Thread-safe.
class Folder {
 public:
  enum class Place { kHere, kGone, kOther };

  // `make`: makes the folder, the folders above it and its key if they are
  // missing. Throws IoError; InvalidArgument for a path that is no folder of
  // this user alone, or that holds other files.
  static std::shared_ptr<const Folder> Open(const std::string& path, bool make);

  const Directory& directory() const { return directory_; }
  // Returns what a path leads to now.
  Place PlaceOf(const std::string& path) const;
  FileName NameFor(const ObjectKey& key) const;
  ObjectName NameOfAddress(const Address& address) const;

  // Writes an object. Returns 0 if it is there now, EEXIST if it was there
  // already, else the error: ENOENT if the folder is gone.
  [[nodiscard]] int Publish(const FileName& name,
                            std::span<const uint8_t> bytes) const noexcept;
  // Opens the subfolder of two hex digits, which it makes with `make`; not open
  // if there is none.
  Directory OpenSubfolder(const std::string& name, bool make) const;
  // Opens the file for File::TryLock.
  File OpenLock() const;
  // The name of subfolder `i` of 256.
  static std::string SubfolderName(size_t i);

 private:
  explicit Folder(Directory directory) : directory_(std::move(directory)) {}
  enum class KeyState { kRead, kMissing, kBad };
  KeyState ReadKey();
  void FindKey(const std::string& path, bool make);
  // `durable`: returns when the disk has it.
  int PublishIn(const Directory& folder, const std::string& name,
                std::span<const uint8_t> bytes, bool durable) const;

  const Directory directory_;
  std::array<uint8_t, 32> key_{};
  // Files without a name cannot get one here, as on some file systems and
  // without /proc.
  mutable std::atomic<bool> named_only_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_FOLDER_H_
