#include "engine/token_masks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace gkv {
namespace {

constexpr size_t kVocab = 40;
using Ids = std::vector<int32_t>;

// Allows, after n tokens, those of the n-th row; a row of none ends the text.
struct Rows : Constraint {
  explicit Rows(std::initializer_list<Ids> rows, bool may_end = false)
      : rows(rows), may_end(may_end) {}
  bool ComputeMask(std::span<uint32_t> mask) override {
    std::fill(mask.begin(), mask.end(), 0);
    for (const int32_t id : rows.at(accepted.size())) {
      mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
    }
    return may_end || rows.at(accepted.size()).empty();
  }
  void Accept(int32_t id) override { accepted.push_back(id); }
  void Rollback(size_t count) override {
    accepted.resize(accepted.size() - count);
  }
  std::unique_ptr<Constraint> Clone() const override {
    return nullptr;
  }
  const std::vector<Ids> rows;
  const bool may_end;
  Ids accepted;
};

Ids Allowed(const TokenMasks& masks, size_t row) {
  Ids ids;
  for (int32_t id = 0; id < static_cast<int32_t>(kVocab); ++id) {
    const uint32_t word = masks.Of(row)[static_cast<size_t>(id) / 32];
    if (word >> (id % 32) & 1) ids.push_back(id);
  }
  return ids;
}

TEST(TokenMasksTest, NoConstraintMeansNoMasks) {
  EXPECT_TRUE(TokenMasks().empty());
  EXPECT_FALSE(TokenMasks(1, kVocab).empty());
}

TEST(TokenMasksTest, EachRowFollowsFromTheGuessBefore) {
  Rows constraint({Ids{3, 35}, Ids{4}, Ids{5, 6}});
  TokenMasks masks(3, kVocab);
  masks.Compute(constraint, Ids{35, 4}, {}, nullptr);
  EXPECT_EQ(Allowed(masks, 0), (Ids{3, 35}));
  EXPECT_EQ(Allowed(masks, 1), (Ids{4}));
  EXPECT_EQ(Allowed(masks, 2), (Ids{5, 6}));
  EXPECT_TRUE(constraint.accepted.empty()) << "it stands where it stood";
}

TEST(TokenMasksTest, RowsAfterAGuessThatMayNotBeHaveNone) {
  Rows constraint({Ids{3}, Ids{4}, Ids{5}});
  TokenMasks masks(3, kVocab);
  masks.Compute(constraint, Ids{3, 9}, {}, nullptr);
  EXPECT_EQ(Allowed(masks, 1), (Ids{4}));
  EXPECT_EQ(Allowed(masks, 2), Ids{});
  EXPECT_FALSE(masks.Ends(2));
  EXPECT_TRUE(constraint.accepted.empty());
}

TEST(TokenMasksTest, StopIdsAreAllowedWhereTheTextMayEnd) {
  Rows goes_on({Ids{3}}), may_end({Ids{3}}, true), ends({Ids{}});
  for (auto [constraint, allowed, is_end] :
       {std::tuple(&goes_on, Ids{3}, false), {&may_end, Ids{1, 3}, false},
        {&ends, Ids{}, true}}) {
    TokenMasks masks(1, kVocab);
    masks.Compute(*constraint, {}, Ids{1}, nullptr);
    EXPECT_EQ(Allowed(masks, 0), allowed);
    EXPECT_EQ(masks.Ends(0), is_end);
  }
}

TEST(TokenMasksTest, AGuessThatStopsIsTheLast) {
  Rows constraint({Ids{3}, Ids{4}}, true);
  TokenMasks masks(2, kVocab);
  masks.Compute(constraint, Ids{1}, Ids{1}, nullptr);
  EXPECT_EQ(Allowed(masks, 0), (Ids{1, 3}));
  EXPECT_EQ(Allowed(masks, 1), Ids{});
}

TEST(TokenMasksTest, WhatIsThrownComesWhereARowIsTaken) {
  Rows constraint({Ids{3}});
  TokenMasks masks(2, kVocab);
  masks.Compute(constraint, Ids{3}, {}, nullptr);  // there is no second row
  EXPECT_THROW((void)masks.Of(0), std::out_of_range);
  TokenMasks other(1, kVocab);
  other.Compute(constraint, {}, {},
                std::make_exception_ptr(std::domain_error("before")));
  EXPECT_THROW((void)other.Of(0), std::domain_error);
}

}  // namespace
}  // namespace gkv
