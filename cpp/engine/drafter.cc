#include "engine/drafter.h"

#include <algorithm>
#include <new>

namespace gkv {
namespace {

// Asks the drafter of one request. Throws what it throws.
void AskDrafter(Candidate& c) {
  if (!c.sources.drafter || (c.decodes && !c.is_new)) return;
  const size_t length = c.cache->length();
  std::vector<int32_t> added;
  try {
    added.resize(length - c.told);
    if (c.decodes) c.proposed.resize(c.most);
  } catch (const std::bad_alloc&) {
    c.proposed.clear();
    return;  // the next call has these tokens, too
  }
  c.cache->CopyTokens(c.told, added);
  c.told = length;
  if (!c.decodes) {
    c.sources.drafter->Read(added, c.read);
    return;
  }
  size_t count = 0;
  try {
    count = c.sources.drafter->Propose(added, c.proposed);
  } catch (const std::bad_alloc&) {
    // Nothing is guessed of what follows.
  }
  c.proposed.resize(std::min(c.proposed.size(), count));
}

}  // namespace

void DrafterGuesser::Propose(std::span<Candidate* const> round,
                             const GuessCosts&) noexcept {
  for (Candidate* const c : round) {
    try {
      AskDrafter(*c);
    } catch (...) {
      c->error = std::current_exception();
      c->proposed.clear();
    }
  }
}

void DrafterGuesser::End(Candidate& c) noexcept {
  if (!c.sources.drafter) return;
  try {
    std::vector<int32_t> added(c.cache->length() - c.told);
    c.cache->CopyTokens(c.told, added);
    c.sources.drafter->End(added);
  } catch (const std::bad_alloc&) {
    // The drafter does without them.
  }
  c.sources.drafter = nullptr;
}

}  // namespace gkv
