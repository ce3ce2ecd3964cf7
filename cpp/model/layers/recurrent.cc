#include "model/layers/recurrent.h"

#include <algorithm>

#include "ops/elementwise.h"
#include "ops/recurrent.h"

namespace gkv {

// One diagonal block: channels [first, first + channels) of every row.
class Recurrent::Block {
 public:
  Block(Recurrent& owner, const RecurrentWeights& weights, size_t layer,
        size_t block)
      : o_(owner),
        width_(owner.config_.lru_width),
        conv_width_(owner.config_.conv_width),
        channels_(width_ / owner.config_.lru_blocks),
        first_(block * channels_),
        layer_(layer),
        weights_(weights) {}

  // `scratch` is what MatMul works in.
  void Run(std::span<const SequenceSlice> slices, uint8_t* scratch) const {
    AddBiases();
    ForStretches(slices, [&](const Stretch& part) {
      CausalConv({At(o_.x_, part.row), width_}, part.rows, channels_,
                 weights_.conv_taps.data() + first_,
                 weights_.conv_bias.data() + first_, conv_width_,
                 part.state + width_, At(o_.convolved_, part.row));
      for (size_t i = 1; part.copy != nullptr && i < conv_width_; ++i) {
        CopyState(part, i * width_);
      }
    });
    Gate(weights_.input_gate, scratch, o_.input_gate_);
    Gate(weights_.a_gate, scratch, o_.a_gate_);
    const LruGates gates = {weights_.input_gate_bias.data() + first_,
                            weights_.a_gate_bias.data() + first_,
                            weights_.decay.data() + first_};
    ForStretches(slices, [&](const Stretch& part) {
      LruScan({At(o_.convolved_, part.row), width_},
              At(o_.input_gate_, part.row), At(o_.a_gate_, part.row), gates,
              part.position, part.rows, channels_, part.state,
              At(o_.x_, part.row));
      if (part.copy != nullptr) CopyState(part, 0);
    });
    for (size_t row = 0; row < o_.output_.rows; ++row) {
      GeluMul(At(o_.y_, row), At(o_.x_, row), channels_,
              o_.output_.row(row) + first_);
    }
  }

 private:
  // Rows of a slice up to where its state is to be copied, or to its end.
  struct Stretch {
    size_t position;
    size_t row;
    size_t rows;
    float* state;  // the recurrence's, then the convolution's last inputs
    float* copy;   // null: none
  };

  float* At(AlignedBuffer<float>& buffer, size_t row) const {
    return buffer.data() + row * width_ + first_;
  }
  void CopyState(const Stretch& part, size_t offset) const {
    std::copy_n(part.state + offset, channels_, part.copy + offset);
  }
  template <typename Fn>
  void ForStretches(std::span<const SequenceSlice> slices, const Fn& fn) const {
    size_t row = 0;
    for (const SequenceSlice& slice : slices) {
      const GroupStep& group =
          slice.view->groups[slice.layout->group_of(layer_)];
      const auto state = [&](uint8_t* block) {
        return reinterpret_cast<float*>(block +
                                        slice.layout->state_offset(layer_)) +
               first_;
      };
      size_t position = slice.view->begin;
      const auto run_to = [&](size_t end, float* copy) {
        fn(Stretch{position, row, end - position, state(group.blocks[0]),
                   copy});
        row += end - position;
        position = end;
      };
      for (const auto& [end, block] : group.kept) {
        run_to(end, state(block.data()));
      }
      run_to(slice.view->begin + slice.tokens.size(), nullptr);
    }
  }
  void AddBiases() const {
    if (weights_.x_bias.size() == 0) return;
    for (size_t row = 0; row < o_.output_.rows; ++row) {
      Add(weights_.x_bias.data() + first_, channels_, At(o_.x_, row));
      Add(weights_.y_bias.data() + first_, channels_, At(o_.y_, row));
    }
  }
  // Multiplies the block's part of a gate, whose rows read the block's
  // channels.
  void Gate(const PackedMatrix& matrix, uint8_t* scratch,
            AlignedBuffer<float>& out) const {
    const MatMulInput input{At(o_.convolved_, 0), width_, {}, o_.output_.rows};
    MatMul(matrix.view(), input, first_ / kRowGroup,
           (first_ + channels_) / kRowGroup, scratch, out.data(), width_);
  }

  Recurrent& o_;
  const size_t width_;
  const size_t conv_width_;
  const size_t channels_;
  const size_t first_;
  const size_t layer_;
  const RecurrentWeights& weights_;
};

Activations& Recurrent::Mix(const RecurrentWeights& weights, size_t layer,
                            Activations& input, const StepWork& work) {
  const size_t rows = work.rows().size();
  for (AlignedBuffer<float>* buffer :
       {&x_, &y_, &convolved_, &input_gate_, &a_gate_}) {
    buffer->EnsureSize(rows * config_.lru_width);
  }
  output_.Resize(rows, config_.lru_width);
  work.MatMuls(StepPart::kRecurrence, {{&weights.x, &input, x_.data()},
                                       {&weights.y, &input, y_.data()}});
  work.pool().Run(config_.lru_blocks, [&](size_t block, size_t thread) {
    Block(*this, weights, layer, block)
        .Run(work.slices(), work.pool().scratch(thread));
  });
  work.ForRows(StepPart::kNorms, [&](size_t row) { output_.Quantize(row); });
  return output_;
}

}  // namespace gkv
