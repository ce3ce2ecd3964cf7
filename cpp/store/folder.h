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

// The folders of docs/block-store-format.md: how they are opened, what files in
// them are called, how one appears.

namespace gkv {

inline constexpr std::string_view kTemporaryPrefix = ".tmp-";

// What the name of an object's file says of it.
struct FileName {
  ObjectName name;
  ObjectName parent;  // of what it hangs on
  uint64_t end = 0;
  std::array<uint8_t, 8> salt{};  // how the salt's digest begins
  ObjectKind kind = ObjectKind::kPage;

  auto operator<=>(const FileName&) const = default;

  std::string Text() const;
  // Of the folder that it is in: two hex digits.
  std::string Subfolder() const;
  std::string Path() const { return Subfolder() + "/" + Text(); }
  // Whether its parent is an object: neither a root nor nothing.
  bool HangsOnObject() const;
  // Exactly what Text() gives; nothing else is one.
  static std::optional<FileName> Parse(std::string_view text);
};

// A folder that was opened, and checked then. All calls are of that one,
// wherever its path leads by now. Thread-safe.
class Folder {
 public:
  enum class Place { kHere, kGone, kOther };

  // `make`: makes it, folders above it and its key where they are missing.
  // Throws IoError, InvalidArgument for what is no folder of this user's alone,
  // or holds other files.
  static std::shared_ptr<const Folder> Open(const std::string& path, bool make);

  const Directory& directory() const { return directory_; }
  // What a path leads to now.
  Place PlaceOf(const std::string& path) const;
  FileName NameFor(const ObjectKey& key) const;
  ObjectName NameOfAddress(const Address& address) const;

  // 0 if the object is there now, EEXIST if something was already, else what
  // failed: ENOENT if the folder is gone.
  [[nodiscard]] int Publish(const FileName& name,
                            std::span<const uint8_t> bytes) const noexcept;
  // The subfolder of two hex digits; not open if there is none. Makes it.
  Directory OpenSubfolder(const std::string& name, bool make) const;
  // For File::TryLock.
  File OpenLock() const;
  // Of all 256.
  static std::string SubfolderName(size_t i);

 private:
  explicit Folder(Directory directory) : directory_(std::move(directory)) {}
  enum class KeyState { kRead, kMissing, kBad };
  KeyState ReadKey();
  void FindKey(const std::string& path, bool make);
  // `durable`: not before the disk has it.
  int PublishIn(const Directory& folder, const std::string& name,
                std::span<const uint8_t> bytes, bool durable) const;

  const Directory directory_;
  std::array<uint8_t, 32> key_{};
  // Files without a name cannot get one here: some file systems, no /proc.
  mutable std::atomic<bool> named_only_ = false;
};

}  // namespace gkv

#endif  // GEMMAKV_STORE_FOLDER_H_
