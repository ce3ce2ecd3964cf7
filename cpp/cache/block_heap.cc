#include "cache/block_heap.h"

#include <cstdlib>
#include <new>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/rounding.h"

namespace gkv {
namespace {

// The most bytes of free blocks that are kept. A decoding conversation takes
// and drops a block of each group now and then; more should go back to the
// system.
constexpr size_t kMaxKeptBytes = size_t{16} << 20;

Block* NewBlock(size_t size_bytes) noexcept {
  auto* data = static_cast<uint8_t*>(
      std::aligned_alloc(kAlignment, RoundUp(size_bytes, kAlignment)));
  auto* block = data != nullptr ? new (std::nothrow) Block : nullptr;
  if (block == nullptr) {
    std::free(data);
    return nullptr;
  }
  block->data = data;
  block->size_bytes = size_bytes;
  return block;
}

}  // namespace

Block* BlockHeap::Allocate(size_t size_bytes, size_t room) noexcept {
  Block** kept = nullptr;
  try {
    kept = &kept_[size_bytes];
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  if (Block* block = *kept) {
    *kept = std::exchange(block->next, nullptr);
    kept_bytes_ -= size_bytes;
    block->refs = 1;
    return block;
  }
  if (kept_bytes_ > room) Clear();
  Block* block = NewBlock(size_bytes);
  if (block == nullptr && kept_bytes_ > 0) {
    Clear();
    block = NewBlock(size_bytes);
  }
  return block;
}

bool BlockHeap::Keep(Block* block) noexcept {
  if (kept_bytes_ + block->size_bytes > kMaxKeptBytes) return false;
  block->next = std::exchange(kept_.find(block->size_bytes)->second, block);
  kept_bytes_ += block->size_bytes;
  return true;
}

void BlockHeap::Delete(Block* block) noexcept {
  std::free(block->data);
  delete block;
}

void BlockHeap::Clear() noexcept {
  for (auto& [size, first] : kept_) {
    while (first != nullptr) {
      Delete(std::exchange(first, first->next));
    }
  }
  kept_bytes_ = 0;
}

}  // namespace gkv
