#include "ops/recurrent.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "ops/every_target.h"

namespace gkv {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Normal(size_t size, uint32_t seed, float deviation = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> x(size);
  for (float& value : x) value = normal(rng);
  return x;
}

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// A convolution over `stride` channels of which the first `channels` count.
struct Conv {
  size_t width, rows, channels, stride;
  std::vector<float> taps, bias, tail, in;

  Conv(size_t width_in, size_t rows_in, size_t channels_in)
      : width(width_in),
        rows(rows_in),
        channels(channels_in),
        stride(channels_in + 3),
        taps(Normal(width * stride, 1)),
        bias(Normal(stride, 2)),
        tail(Normal((width - 1) * stride, 3)),
        in(Normal(rows * stride, 4)) {}

  // Rows [begin, end); advances the tail.
  void Run(size_t begin, size_t end, std::vector<float>& out) {
    CausalConv({in.data() + begin * stride, stride}, end - begin, channels,
               taps.data(), bias.data(), width, tail.data(),
               out.data() + begin * stride);
  }
  std::vector<float> Run() {
    std::vector<float> out(rows * stride, -1);
    Run(0, rows, out);
    return out;
  }
  // The input of channel c at row r, counted from the first of `in`.
  double Input(const std::vector<float>& old_tail, ptrdiff_t r,
               size_t c) const {
    const ptrdiff_t before = static_cast<ptrdiff_t>(width) - 1;
    return r < 0 ? old_tail[static_cast<size_t>(r + before) * stride + c]
                 : in[static_cast<size_t>(r) * stride + c];
  }
};

class RecurrentTest : public EveryTargetTest {};

TEST_F(RecurrentTest, ConvolutionIsThatOfItsDescription) {
  OnEveryTarget([] {
    for (const size_t width : {1, 2, 4, 7, 65}) {
      for (const size_t rows : {1, 2, 3, 5, 70}) {
        for (const size_t channels : {1, 15, 16, 17, 64}) {
          Conv conv(width, rows, channels);
          const std::vector<float> old_tail = conv.tail;
          const std::vector<float> out = conv.Run();
          for (size_t r = 0; r < rows; ++r) {
            for (size_t c = 0; c < conv.stride; ++c) {
              const float found = out[r * conv.stride + c];
              if (c >= channels) {
                ASSERT_EQ(found, -1) << "wrote beside its channels";
                continue;
              }
              double sum = conv.bias[c];
              for (size_t k = 0; k < width; ++k) {
                const ptrdiff_t at = static_cast<ptrdiff_t>(r + k + 1) -
                                     static_cast<ptrdiff_t>(width);
                sum += conv.taps[k * conv.stride + c] *
                       conv.Input(old_tail, at, c);
              }
              ASSERT_NEAR(found, sum, 1e-5 * static_cast<double>(width));
            }
          }
          for (size_t k = 0; k + 1 < width; ++k) {
            const ptrdiff_t at = static_cast<ptrdiff_t>(rows + k + 1) -
                                 static_cast<ptrdiff_t>(width);
            for (size_t c = 0; c < channels; ++c) {
              ASSERT_EQ(conv.tail[k * conv.stride + c],
                        conv.Input(old_tail, at, c));
            }
          }
        }
      }
    }
  });
}

TEST_F(RecurrentTest, ConvolutionIsTheSameHoweverRowsAreCut) {
  ExpectSameBits([] {
    Conv whole(4, 23, 37), cut(4, 23, 37);
    const std::vector<float> expected = whole.Run();
    std::vector<float> out(expected.size(), -1);
    size_t begin = 0;
    for (const size_t rows : {1, 1, 2, 1, 3, 4, 5, 6}) {
      cut.Run(begin, begin + rows, out);
      begin += rows;
    }
    EXPECT_EQ(begin, cut.rows);
    EXPECT_EQ(Bits(out), Bits(expected));
    EXPECT_EQ(Bits(cut.tail), Bits(whole.tail));
    return out;
  });
}

TEST_F(RecurrentTest, DecayIsMinusEightTimesSoftplus) {
  std::vector<float> param = Normal(61, 5, 3);
  param.insert(param.end(), {0, -200, 200, -87.5f, 30, -30, 1e-8f});
  ExpectSameBits([&] {
    std::vector<float> decay(param.size());
    LruDecay(param.data(), param.size(), decay.data());
    for (size_t i = 0; i < param.size(); ++i) {
      const double x = param[i];
      const double expected =
          -8 * (std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
      EXPECT_NEAR(decay[i], expected, 1e-6 * std::abs(expected) + 1e-36) << x;
    }
    std::vector<float> in_place = param;
    LruDecay(in_place.data(), in_place.size(), in_place.data());
    EXPECT_EQ(Bits(in_place), Bits(decay));
    return decay;
  });
}

struct Scan {
  size_t rows, channels, stride;
  std::vector<float> x, input_gate, a_gate, input_bias, a_bias, decay, state;

  Scan(size_t rows_in, size_t channels_in)
      : rows(rows_in),
        channels(channels_in),
        stride(channels_in + 5),
        x(Normal(rows * stride, 1)),
        input_gate(Normal(rows * stride, 2, 3)),
        a_gate(Normal(rows * stride, 3, 3)),
        input_bias(Normal(stride, 4)),
        a_bias(Normal(stride, 5)),
        decay(stride),
        state(Normal(stride, 6)) {
    const std::vector<float> param = Normal(stride, 7, 2);
    LruDecay(param.data(), stride, decay.data());
  }

  void Run(size_t position, size_t begin, size_t end, std::vector<float>& out) {
    const size_t at = begin * stride;
    LruScan({x.data() + at, stride}, input_gate.data() + at, a_gate.data() + at,
            {input_bias.data(), a_bias.data(), decay.data()}, position + begin,
            end - begin, channels, state.data(), out.data() + at);
  }
  std::vector<float> Run(size_t position) {
    std::vector<float> out(rows * stride, -1);
    Run(position, 0, rows, out);
    return out;
  }
};

TEST_F(RecurrentTest, ScanIsThatOfItsDescription) {
  OnEveryTarget([] {
    for (const size_t position : {0, 1, 1000}) {
      for (const size_t rows : {1, 2, 40}) {
        for (const size_t channels : {1, 15, 16, 17, 48}) {
          Scan scan(rows, channels);
          const std::vector<float> before = scan.state;
          const std::vector<float> out = scan.Run(position);
          for (size_t c = 0; c < scan.stride; ++c) {
            if (c >= channels) {
              EXPECT_EQ(out[c], -1) << "wrote beside its channels";
              EXPECT_EQ(scan.state[c], before[c]);
              continue;
            }
            double h = before[c];
            for (size_t r = 0; r < rows; ++r) {
              const size_t at = r * scan.stride + c;
              const double input =
                  scan.x[at] * Sigmoid(static_cast<double>(scan.input_gate[at] +
                                                           scan.input_bias[c]));
              const double a = std::exp(
                  scan.decay[c] * Sigmoid(static_cast<double>(scan.a_gate[at] +
                                                              scan.a_bias[c])));
              h = position + r == 0 ? input
                                    : a * h + std::sqrt(1 - a * a) * input;
              ASSERT_NEAR(out[at], h, 2e-5 * (1 + std::abs(h)));
            }
            EXPECT_EQ(scan.state[c], out[(rows - 1) * scan.stride + c]);
          }
        }
      }
    }
  });
}

TEST_F(RecurrentTest, ScanIsTheSameHoweverRowsAreCutAndInPlace) {
  ExpectSameBits([] {
    Scan whole(25, 37), cut(25, 37), in_place(25, 37);
    const std::vector<float> expected = whole.Run(0);
    std::vector<float> out(expected.size(), -1);
    size_t begin = 0;
    for (const size_t rows : {1, 2, 1, 5, 7, 9}) {
      cut.Run(0, begin, begin + rows, out);
      begin += rows;
    }
    EXPECT_EQ(begin, cut.rows);
    EXPECT_EQ(Bits(out), Bits(expected));
    EXPECT_EQ(Bits(cut.state), Bits(whole.state));
    in_place.Run(0, 0, in_place.rows, in_place.x);
    for (size_t r = 0; r < whole.rows; ++r) {
      for (size_t c = 0; c < whole.channels; ++c) {
        const size_t at = r * whole.stride + c;
        EXPECT_EQ(in_place.x[at], expected[at]);
      }
    }
    return out;
  });
}

// A factor close to 1: what an input adds is small, and keeps its digits.
TEST_F(RecurrentTest, SlowChannelsTakeInputsInExactly) {
  OnEveryTarget([] {
    Scan scan(1, 40);
    std::fill(scan.state.begin(), scan.state.end(), 0.0f);
    std::fill(scan.a_bias.begin(), scan.a_bias.end(), 0.0f);
    for (size_t c = 0; c < scan.channels; ++c) {
      scan.a_gate[c] = -static_cast<float>(c) / 4;
      scan.decay[c] = -0.008f;
    }
    const std::vector<float> out = scan.Run(1);
    for (size_t c = 0; c < scan.channels; ++c) {
      const double log_a = scan.decay[c] * Sigmoid(double{scan.a_gate[c]});
      const double expected =
          std::sqrt(-std::expm1(2 * log_a)) * scan.x[c] *
          Sigmoid(static_cast<double>(scan.input_gate[c] + scan.input_bias[c]));
      ASSERT_NEAR(out[c], expected, 1e-6 * std::abs(expected)) << c;
    }
  });
}

TEST_F(RecurrentTest, NothingBeforePositionZeroCounts) {
  OnEveryTarget([] {
    Scan clean(3, 20), dirty(3, 20);
    std::fill(dirty.state.begin(), dirty.state.end(), kNan);
    const std::vector<float> expected = clean.Run(0);
    EXPECT_EQ(Bits(dirty.Run(0)), Bits(expected));
  });
}

TEST_F(RecurrentTest, ExtremeGatesSaturateAndNanStays) {
  OnEveryTarget([] {
    Scan scan(1, 3);
    scan.input_gate = {1000, -1000, 0, 0, 0, 0, 0, 0};
    scan.a_gate = {-1000, 1000, kNan, 0, 0, 0, 0, 0};
    scan.state = {2, 3, 4, 0, 0, 0, 0, 0};
    scan.decay = {-1, -1000, -1, -1, -1, -1, -1, -1};
    const std::vector<float> out = scan.Run(7);
    EXPECT_FLOAT_EQ(out[0], 2) << "a closed gate keeps the state";
    EXPECT_NEAR(out[1], 0, 1e-30) << "an open one forgets it";
    EXPECT_TRUE(std::isnan(out[2]));
  });
}

}  // namespace
}  // namespace gkv
