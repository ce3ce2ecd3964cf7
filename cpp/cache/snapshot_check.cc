#include "cache/snapshot_check.h"

#include <optional>
#include <utility>

#include "base/error.h"
#include "cache/conversation.h"
#include "cache/snapshot_format.h"
#include "io/byte_io.h"

namespace gkv {
namespace {

constexpr size_t kSealBytes = sizeof(Hash128);

// Removes the name of the format from a message of the decoder.
std::string Brief(const std::string& message) {
  constexpr std::string_view kPrefix = "snapshot: ";
  return message.starts_with(kPrefix) ? message.substr(kPrefix.size())
                                      : message;
}

// Checks a section of `size` bytes and the checksum after it. Returns false if
// it does not fit: then nothing can be said of what comes after it.
bool CheckSealed(const char* name, uint64_t size, ByteReader& reader,
                 SnapshotCheck& check) {
  const size_t offset = reader.offset();
  const size_t left = reader.remaining();
  if (left < kSealBytes || size > left - kSealBytes) {
    check.sections.push_back(
        {name, offset, left,
         StrCat("expected ", size, " bytes and a checksum of ", kSealBytes,
                ", found ", left, " bytes")});
    return false;
  }
  const std::span<const uint8_t> content = reader.ReadBytes(size, name);
  const bool good = reader.Read<Hash128>(name) == HashBytes(content);
  check.sections.push_back({name, offset, reader.offset() - offset,
                            good ? "" : "the checksum does not match"});
  return true;
}

std::optional<SnapshotHeader> CheckHeaderSection(std::span<const uint8_t> bytes,
                                                 ByteReader& reader,
                                                 SnapshotCheck& check) {
  try {
    SnapshotHeader header = DecodeSnapshotHeader(bytes, reader);
    check.sections.push_back({"header", 0, reader.offset(), ""});
    return header;
  } catch (const CorruptFile& error) {
    check.sections.push_back({"header", 0, bytes.size(), Brief(error.what())});
    return std::nullopt;
  }
}

}  // namespace

SnapshotCheck CheckSnapshot(std::span<const uint8_t> bytes) {
  SnapshotCheck check;
  ByteReader start(bytes);
  check.version = ReadSnapshotVersion(start);
  ByteReader reader(bytes);
  const std::optional<SnapshotHeader> header =
      CheckHeaderSection(bytes, reader, check);
  if (!header) return check;
  std::optional<KvLayout> layout;
  try {
    layout.emplace(header->layers, header->dtype, 64);
  } catch (const InvalidArgument& error) {
    check.sections[0].problem = error.what();
    return check;
  }
  if (!CheckSealed("token ids", header->length * sizeof(int32_t), reader,
                   check) ||
      !CheckSealed("keys and values", SnapshotPayloadBytes(*layout, *header),
                   reader, check)) {
    return check;
  }
  for (const SnapshotSection& section : check.sections) {
    if (!section.problem.empty()) return check;
  }
  SnapshotSection content{"content", 0, 0, ""};
  try {
    (void)Conversation::FromBytes(bytes);
  } catch (const CorruptFile& error) {
    content.problem = Brief(error.what());
  }
  check.sections.push_back(std::move(content));
  return check;
}

}  // namespace gkv
