#include "model/weights/packed_weights.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/says.h"
#include "gtest/gtest.h"
#include "io/part_file.h"
#include "io/temp_folder.h"
#include "model/create_conversation.h"
#include "model/tiny_model.h"
#include "model/weights/packed_file.h"
#include "model/weights/source_reader.h"

namespace gkv {
namespace {

using State = PackedReport::State;

struct Loaded {
  Weights weights;
  PackedReport report;
};

Loaded Load(MemorySource& source, const TinyOptions& options,
            const PackedOptions& packed, const LoadProgress& progress = {},
            size_t threads = 1) {
  ThreadPool pool(threads);
  Loaded loaded;
  loaded.weights = LoadPackedWeights(TinyConfig(options), source, pool,
                                     progress, packed, loaded.report);
  return loaded;
}

void ExpectSameMatrix(const PackedMatrix& a, const PackedMatrix& b) {
  EXPECT_EQ(a.type, b.type);
  ASSERT_EQ(a.rows, b.rows);
  ASSERT_EQ(a.cols, b.cols);
  if (a.rows == 0) return;  // a layer of another kind has no such matrix
  EXPECT_EQ(std::memcmp(a.data, b.data,
                        NumGroups(a.rows) * GroupBytes(a.type, a.cols)),
            0);
}

void ExpectSameVector(const FloatVector& a, const FloatVector& b) {
  ASSERT_EQ(a.size(), b.size());
  if (a.size() == 0) return;
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

void ExpectSameTable(const RowTable& a, const RowTable& b) {
  EXPECT_EQ(a.type, b.type);
  ASSERT_EQ(a.rows, b.rows);
  ASSERT_EQ(a.cols, b.cols);
  if (a.rows == 0) return;
  EXPECT_EQ(std::memcmp(a.data, b.data, a.rows * RowBytes(a.type, a.cols)), 0);
}

void ExpectSameRecurrent(const RecurrentWeights& a, const RecurrentWeights& b) {
  for (const auto matrix :
       {&RecurrentWeights::x, &RecurrentWeights::y,
        &RecurrentWeights::input_gate, &RecurrentWeights::a_gate}) {
    ExpectSameMatrix(a.*matrix, b.*matrix);
  }
  for (const auto vector :
       {&RecurrentWeights::x_bias, &RecurrentWeights::y_bias,
        &RecurrentWeights::conv_taps, &RecurrentWeights::conv_bias,
        &RecurrentWeights::input_gate_bias, &RecurrentWeights::a_gate_bias,
        &RecurrentWeights::decay}) {
    ExpectSameVector(a.*vector, b.*vector);
  }
}

void ExpectSameExperts(const ExpertWeights& a, const ExpertWeights& b) {
  for (const auto matrix :
       {&ExpertWeights::router, &ExpertWeights::gate_up, &ExpertWeights::gate,
        &ExpertWeights::up, &ExpertWeights::down}) {
    ExpectSameMatrix(a.*matrix, b.*matrix);
  }
  for (const auto vector :
       {&ExpertWeights::router_scale, &ExpertWeights::expert_scale,
        &ExpertWeights::dense_norm, &ExpertWeights::norm,
        &ExpertWeights::post_norm}) {
    ExpectSameVector(a.*vector, b.*vector);
  }
}

void ExpectSameWeights(const Weights& a, const Weights& b) {
  EXPECT_EQ(a.fingerprint, b.fingerprint);
  ExpectSameMatrix(a.embedding, b.embedding);
  ExpectSameMatrix(a.head, b.head);
  ExpectSameVector(a.final_norm, b.final_norm);
  ExpectSameTable(a.ple_table, b.ple_table);
  ExpectSameMatrix(a.ple_proj, b.ple_proj);
  ExpectSameVector(a.ple_norm, b.ple_norm);
  ASSERT_EQ(a.altup_proj.size(), b.altup_proj.size());
  for (size_t i = 0; i < a.altup_proj.size(); ++i) {
    ExpectSameMatrix(a.altup_proj[i], b.altup_proj[i]);
    ExpectSameMatrix(a.altup_unembed[i], b.altup_unembed[i]);
  }
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (size_t i = 0; i < a.layers.size(); ++i) {
    const LayerWeights &x = a.layers[i], &y = b.layers[i];
    for (const auto matrix :
         {&LayerWeights::q, &LayerWeights::k, &LayerWeights::v,
          &LayerWeights::o, &LayerWeights::gate, &LayerWeights::up,
          &LayerWeights::down, &LayerWeights::ple_gate,
          &LayerWeights::ple_proj, &LayerWeights::laurel_left,
          &LayerWeights::laurel_right}) {
      ExpectSameMatrix(x.*matrix, y.*matrix);
    }
    for (const auto vector :
         {&LayerWeights::attn_norm, &LayerWeights::q_norm,
          &LayerWeights::k_norm, &LayerWeights::post_attn_norm,
          &LayerWeights::ffn_norm, &LayerWeights::post_ffn_norm,
          &LayerWeights::o_bias, &LayerWeights::gate_bias,
          &LayerWeights::up_bias, &LayerWeights::down_bias,
          &LayerWeights::output_scale, &LayerWeights::post_ple_norm,
          &LayerWeights::altup_router_norm, &LayerWeights::altup_router,
          &LayerWeights::altup_predict, &LayerWeights::altup_correct,
          &LayerWeights::altup_scale, &LayerWeights::laurel_post_norm}) {
      ExpectSameVector(x.*vector, y.*vector);
    }
    ASSERT_EQ(x.recurrent == nullptr, y.recurrent == nullptr);
    if (x.recurrent) ExpectSameRecurrent(*x.recurrent, *y.recurrent);
    ASSERT_EQ(x.experts == nullptr, y.experts == nullptr);
    if (x.experts) ExpectSameExperts(*x.experts, *y.experts);
  }
}

// Root may write anywhere: runs `check` as another user, in a process of its
// own.
void AsAnotherUser(const std::function<void()>& check) {
  const pid_t child = fork();
  if (child == 0) {
    if (geteuid() == 0 && setuid(65534) != 0) _exit(2);
    check();
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// Runs a step: what it throws, or "".
std::string ErrorOfStep(const TinyOptions& options, Weights& weights) {
  Model model{TinyConfig(options), std::move(weights)};
  ThreadPool pool(2);
  const std::shared_ptr<Conversation> cache =
      CreateConversation(model.config, {});
  const std::vector<int32_t> tokens = {2, 30, 41};
  std::vector<float> logits(model.config.vocab_size);
  std::string message;
  {
    const RunLock lock = cache->Lock();
    cache->Append(lock, tokens);
    const KvStepView view = cache->Prepare(lock, 0, tokens.size());
    const SequenceSlice slice{
        tokens, &view, &cache->layout(), {RowOutput::kLogits, 1, logits.data()}};
    try {
      ForwardPass(model, pool).Step({&slice, 1});
    } catch (const CorruptFile& error) {
      message = error.what();
    }
  }
  weights = std::move(model.weights);
  return message;
}

// A model, what it is without a packed file, and a folder.
class PackedWeightsTest : public testing::Test {
 protected:
  explicit PackedWeightsTest(const TinyOptions& options = MixedTypes())
      : options_(options), source_(TinyTensors(options)) {
    ThreadPool pool(1);
    plain_ = LoadWeights(TinyConfig(options_), source_, pool, {});
    path_ = folder_ / PackedFileName(plain_.fingerprint);
  }
  Loaded Load(const LoadProgress& progress = {}, size_t threads = 1) {
    return gkv::Load(source_, options_, packed_, progress, threads);
  }
  // Loads, with the right weights whatever became of the file.
  PackedReport LoadAndCompare() {
    const Loaded loaded = Load({}, 2);
    ExpectSameWeights(loaded.weights, plain_);
    const bool in_file = loaded.report.state == State::kReused ||
                         loaded.report.state == State::kWritten;
    EXPECT_EQ(loaded.weights.file != nullptr, in_file);
    EXPECT_EQ(loaded.weights.embedding.owned.size() == 0, in_file);
    EXPECT_EQ(loaded.report.path, in_file ? path_ : "");
    return loaded.report;
  }
  void ExpectMemory(const std::string& reason) {
    const PackedReport report = LoadAndCompare();
    EXPECT_EQ(report.state, State::kMemory);
    EXPECT_NE(report.reason.find(reason), std::string::npos) << report.reason;
  }

  TinyOptions options_;
  MemorySource source_;
  Weights plain_;
  TempFolder folder_;
  std::string path_;
  PackedOptions packed_{folder_.path(), std::chrono::milliseconds(60000)};
};

TEST_F(PackedWeightsTest, WrittenOnceThenReused) {
  EXPECT_EQ(LoadAndCompare().state, State::kWritten);
  const std::string bytes = ReadWhole(path_);
  const PackedReport again = LoadAndCompare();
  EXPECT_EQ(again.state, State::kReused);
  EXPECT_EQ(again.reason, "");
  EXPECT_EQ(ReadWhole(path_), bytes);
  EXPECT_EQ(folder_.Names().size(), 1u);
}

TEST(PackedWeightsShapes, EveryShapeAndTypeSurvives) {
  std::vector<TinyOptions> all(4, TinyOptions{});
  all[0].tied = false;
  all[1].qk_norm = false;
  all[1].post_norms = false;
  all[2] = MixedTypes();
  all[2].tied = false;
  all[2].types = {TensorType::kBF16, TensorType::kQ6_K, TensorType::kQ4_0};
  all[3].types = {TensorType::kQ5_0, TensorType::kF16};
  for (const std::string& family : TinyFamilies(true)) {
    all.push_back(TinyFamily(family));
    all.push_back(MixedTypes(all.back()));
  }
  TinyOptions split = TinyFamily("gemma4_moe");
  split.split_experts = true;
  all.push_back(split);
  all.push_back(MixedTypes(split));
  TempFolder folder;
  for (const TinyOptions& options : all) {
    MemorySource source = TinyTensors(options);
    ThreadPool pool(2);
    const Weights plain = LoadWeights(TinyConfig(options), source, pool, {});
    for (const State state : {State::kWritten, State::kReused}) {
      const Loaded loaded = gkv::Load(source, options, {folder.path()});
      EXPECT_EQ(loaded.report.state, state);
      ExpectSameWeights(loaded.weights, plain);
    }
  }
  EXPECT_EQ(folder.Names().size(), all.size());
}

TEST_F(PackedWeightsTest, OtherContentUnderTheSameNameIsAnotherFile) {
  LoadAndCompare();
  for (auto& [name, tensor] : source_.tensors) {
    tensor.bytes[tensor.bytes.size() / 3] ^= 1;
    const Loaded changed = Load();
    EXPECT_EQ(changed.report.state, State::kWritten) << name;
    ThreadPool pool(1);
    ExpectSameWeights(changed.weights,
                      LoadWeights(TinyConfig(options_), source_, pool, {}));
    tensor.bytes[tensor.bytes.size() / 3] ^= 1;
    std::filesystem::remove(changed.report.path);
  }
  EXPECT_EQ(LoadAndCompare().state, State::kReused);
}

TEST_F(PackedWeightsTest, AWrongFileIsReplaced) {
  LoadAndCompare();
  const std::string sound = ReadWhole(path_);
  std::string flipped = sound, version = sound;
  const PackedFile file(path_, plain_.fingerprint);
  flipped[file.Find("output_norm.weight")->offset] ^= 1;
  ++version[12];
  const std::vector<std::string> wrong = {
      flipped,    version, "", "garbage", sound.substr(0, sound.size() / 2),
      sound + "x"};
  for (const std::string& content : wrong) {
    WriteWhole(path_, content);
    const PackedReport report = LoadAndCompare();
    EXPECT_EQ(report.state, State::kWritten);
    EXPECT_NE(report.reason.find(path_), std::string::npos) << report.reason;
    EXPECT_EQ(ReadWhole(path_), sound);
    EXPECT_EQ(LoadAndCompare().state, State::kReused);
  }
}

// Each tensor, in each of its pieces: either the load replaces the file, or the
// first step with the tensor fails, and the next load replaces the file.
void ExpectDamageIsNoticed(const TinyOptions& options) {
  TempFolder folder;
  const PackedOptions packed{folder.path()};
  MemorySource source = TinyTensors(options);
  const Loaded first = Load(source, options, packed);
  const std::string path = first.report.path;
  const std::string sound = ReadWhole(path);
  size_t late = 0;
  for (const auto& [name, stored] : source.tensors) {
    const PackedFile::Tensor& tensor = *first.weights.file->Find(name);
    for (size_t piece = 0; piece < tensor.num_pieces(); ++piece) {
      const size_t end = std::min(tensor.size_bytes(),
                                  (piece + 1) * tensor.piece_bytes);
      std::string damaged = sound;
      damaged[tensor.offset + end - 1] ^= 0x10;
      WriteWhole(path, damaged);
      Loaded loaded = Load(source, options, packed);
      const bool is_late = loaded.report.state == State::kReused;
      const bool is_gate = name.find("rec_a_gate") != std::string::npos ||
                           name.find("rec_input_gate") != std::string::npos ||
                           name.find("ffn_gate_inp") != std::string::npos;
      EXPECT_EQ(is_late, !tensor.is_vector && !is_gate) << name;
      if (is_late) {
        ++late;
        const std::string message = ErrorOfStep(options, loaded.weights);
        EXPECT_TRUE(Says(message, {path, name, "sum"}));
        EXPECT_EQ(ErrorOfStep(options, loaded.weights), message);
        EXPECT_EQ(Load(source, options, packed).report.state, State::kWritten);
      }
      EXPECT_EQ(ReadWhole(path), sound);
    }
  }
  EXPECT_GT(late, 15u) << "damaged pieces that a step found";
  Loaded loaded = Load(source, options, packed);
  EXPECT_EQ(loaded.report.state, State::kReused);
  EXPECT_EQ(ErrorOfStep(options, loaded.weights), "");
}

TEST(PackedWeightsDamage, NoOutputComesOfDamagedWeights) {
  TinyOptions untied;
  untied.tied = false;
  untied.num_layers = 3;
  untied.ffn = 2 * kSlabRows + 32;
  ExpectDamageIsNoticed(untied);
  for (const char* family : {"recurrentgemma", "gemma4_moe"}) {
    TinyOptions options = TinyFamily(family);
    options.num_layers = 3;
    ExpectDamageIsNoticed(options);
  }
}

// A file that nobody could delete later is checked by the load.
TEST_F(PackedWeightsTest, ADamagedFileThatMustStayIsFoundByTheLoad) {
  LoadAndCompare();
  std::string damaged = ReadWhole(path_);
  const PackedFile file(path_, plain_.fingerprint);
  damaged[file.Find("blk.3.ffn_up.weight")->offset] ^= 1;
  WriteWhole(path_, damaged);
  AsAnotherUser([&] {
    chmod(folder_.path().c_str(), 0555);
    ExpectMemory("Permission denied");
  });
}

// A source that says what it is.
class IdentifiedSource : public MemorySource {
 public:
  Hash128 identity{1, 1};
  bool settles = true;
  size_t reads = 0;
  std::optional<TensorView> Find(std::string_view name) override {
    ++reads;
    return MemorySource::Find(name);
  }
  std::optional<Hash128> Identity() const override { return identity; }
  bool Settle() const override { return settles; }
};

class SourceRecordTest : public PackedWeightsTest {
 protected:
  SourceRecordTest() { known_.tensors = source_.tensors; }
  // Whether the load had to read the source.
  bool Reads(State state) {
    const size_t before = known_.reads;
    const Loaded loaded = gkv::Load(known_, options_, packed_);
    EXPECT_EQ(loaded.report.state, state);
    ThreadPool pool(1);
    ExpectSameWeights(loaded.weights, LoadWeights(TinyConfig(options_),
                                                  source_, pool, {}));
    return known_.reads != before;
  }
  std::string record() {
    for (const std::string& name : folder_.Names()) {
      if (name.ends_with(".gkvsource")) return folder_ / name;
    }
    return "";
  }
  IdentifiedSource known_;
};

TEST_F(SourceRecordTest, AnUnchangedSourceIsReadOnce) {
  EXPECT_TRUE(Reads(State::kWritten));
  EXPECT_FALSE(Reads(State::kReused));
  size_t last = 0, total = 1;
  const Loaded loaded =
      gkv::Load(known_, options_, packed_, [&](size_t done, size_t all) {
        last = done;
        total = all;
      });
  EXPECT_EQ(last, total);
  // Noted also by a load that found the packed file there.
  std::filesystem::remove(record());
  EXPECT_TRUE(Reads(State::kReused));
  EXPECT_FALSE(Reads(State::kReused));
}

TEST_F(SourceRecordTest, AnotherIdentityConfigurationOrTypeIsRead) {
  EXPECT_TRUE(Reads(State::kWritten));
  known_.identity = {1, 2};
  EXPECT_TRUE(Reads(State::kReused));
  source_.tensors["blk.1.ffn_up.weight"].bytes[1] ^= 1;
  known_.tensors = source_.tensors;
  known_.identity = {2, 1};
  EXPECT_TRUE(Reads(State::kWritten));
  EXPECT_FALSE(Reads(State::kReused));
  options_.final_soft_cap = 9;
  EXPECT_TRUE(Reads(State::kWritten));
  packed_.quantize = TensorType::kQ8_0;
  const size_t before = known_.reads;
  const Loaded quantized = gkv::Load(known_, options_, packed_);
  EXPECT_EQ(quantized.report.state, State::kWritten);
  EXPECT_GT(known_.reads, before + 50);
}

TEST_F(SourceRecordTest, ASourceThatMayChangeUnseenIsReadEachTime) {
  known_.settles = false;
  EXPECT_TRUE(Reads(State::kWritten));
  EXPECT_TRUE(Reads(State::kReused));
  EXPECT_EQ(record(), "");
}

TEST_F(SourceRecordTest, AWrongRecordIsNotFollowed) {
  EXPECT_TRUE(Reads(State::kWritten));
  const std::string link = record();
  const std::string name = PackedFileName(plain_.fingerprint);
  for (const std::string& target :
       {std::string("x"), "../" + name, name + "x", PackedFileName({3, 4}),
        std::string(32, 'f'), std::string(300, 'f')}) {
    std::filesystem::remove(link);
    std::filesystem::create_symlink(target, link);
    EXPECT_TRUE(Reads(State::kReused)) << target;
    EXPECT_FALSE(Reads(State::kReused)) << target;
  }
  // A file in its place.
  std::filesystem::remove(link);
  WriteWhole(link, name);
  EXPECT_TRUE(Reads(State::kReused));
  EXPECT_FALSE(Reads(State::kReused));
}

TEST_F(SourceRecordTest, RecordsOfOtherUsersAreNotFollowed) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to give a link away";
  EXPECT_TRUE(Reads(State::kWritten));
  ASSERT_EQ(lchown(record().c_str(), 12345, 0), 0);
  EXPECT_TRUE(Reads(State::kReused));
}

TEST_F(SourceRecordTest, WithoutThePackedFileTheSourceIsRead) {
  EXPECT_TRUE(Reads(State::kWritten));
  std::filesystem::remove(path_);
  EXPECT_TRUE(Reads(State::kWritten));
  WriteWhole(path_, "garbage");
  EXPECT_TRUE(Reads(State::kWritten));
  EXPECT_FALSE(Reads(State::kReused));
}

TEST_F(PackedWeightsTest, AFileOfAnotherModelUnderThisNameIsReplaced) {
  TinyOptions other = options_;
  other.seed = 2;
  MemorySource other_source = TinyTensors(other);
  const Loaded loaded = gkv::Load(other_source, other, packed_);
  std::filesystem::rename(loaded.report.path, path_);
  const PackedReport report = LoadAndCompare();
  EXPECT_EQ(report.state, State::kWritten);
  EXPECT_NE(report.reason.find("another fingerprint"), std::string::npos);
}

TEST_F(PackedWeightsTest, OutlivesItsName) {
  Loaded loaded = Load();
  std::filesystem::remove_all(folder_.path());
  ExpectSameWeights(loaded.weights, plain_);
  // The folder is made again.
  EXPECT_EQ(LoadAndCompare().state, State::kWritten);
}

TEST_F(PackedWeightsTest, WithoutAFolderMemoryServes) {
  WriteWhole(folder_ / "file", "");
  packed_.folder = folder_ / "file";
  ExpectMemory("Not a directory");
  packed_.folder = "/proc/gemmakv";
  ExpectMemory("/proc/gemmakv");
  std::filesystem::create_directory(path_);  // its name is taken
  packed_.folder = folder_.path();
  ExpectMemory("directory");
}

TEST_F(PackedWeightsTest, ReadOnlyFolder) {
  AsAnotherUser([&] {
    chmod(folder_.path().c_str(), 0555);
    ExpectMemory("Permission denied");
  });
}

TEST_F(PackedWeightsTest, ReadOnlyFolderWithTheFileServes) {
  LoadAndCompare();
  chmod(folder_.path().c_str(), 0555);
  EXPECT_EQ(LoadAndCompare().state, State::kReused);
  chmod(folder_.path().c_str(), 0755);
}

TEST_F(PackedWeightsTest, FileSizeLimit) {
  struct rlimit old_limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const struct rlimit small = {4096, old_limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  ExpectMemory("File too large");
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  EXPECT_TRUE(folder_.Names().empty());
  EXPECT_EQ(LoadAndCompare().state, State::kWritten);
}

// As a disk that is full only when it is written to.
TEST_F(PackedWeightsTest, WritingFailsMidway) {
  struct rlimit old_limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const Loaded loaded = Load([&](size_t done, size_t total) {
    if (done < total * 3 / 4) return;
    const struct rlimit small = {4096, old_limit.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
  });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  ExpectSameWeights(loaded.weights, plain_);
  EXPECT_EQ(loaded.report.state, State::kMemory);
  EXPECT_EQ(loaded.report.reason, "packed weights: File too large");
  EXPECT_TRUE(folder_.Names().empty());
}

TEST_F(PackedWeightsTest, AWriterThatDoesNotFinish) {
  const auto part = PartFile::Create(path_, std::chrono::milliseconds(0));
  packed_.patience = std::chrono::milliseconds(30);
  ExpectMemory("another process has held it for 30 ms");
}

TEST_F(PackedWeightsTest, ManyProcessesAtOnce) {
  std::vector<pid_t> children;
  for (int i = 0; i < 8; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      const Loaded loaded = Load({}, 2);
      ExpectSameWeights(loaded.weights, plain_);
      if (HasFailure()) _exit(100);
      _exit(static_cast<int>(loaded.report.state));
    }
    children.push_back(child);
  }
  int written = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    const auto state = static_cast<State>(WEXITSTATUS(status));
    EXPECT_TRUE(state == State::kWritten || state == State::kReused);
    written += state == State::kWritten;
  }
  EXPECT_EQ(written, 1);
  EXPECT_EQ(folder_.Names().size(), 1u);
}

// Changes a tensor after so many calls of Find for it.
class ChangingSource : public MemorySource {
 public:
  std::function<void()> change;
  int calls_left = 1;
  std::optional<TensorView> Find(std::string_view name) override {
    if (name == "blk.2.attn_q.weight" && calls_left-- == 0) change();
    return MemorySource::Find(name);
  }
};

TEST_F(PackedWeightsTest, ASourceThatChangesIsNotKept) {
  for (const bool type_changes : {false, true}) {
    ChangingSource source;
    source.tensors = source_.tensors;
    source.change = [&] {
      source.tensors.at("blk.5.attn_q.weight").bytes[7] ^= 1;
      if (!type_changes) return;
      std::mt19937 rng(1);
      MemorySource::Tensor& t = source.tensors.at("blk.6.ffn_up.weight");
      t.type = TensorType::kF16;
      t.bytes = RandomTensor(t.type, t.rows, t.cols, rng, -1, 1);
    };
    const Loaded loaded = gkv::Load(source, options_, packed_);
    EXPECT_EQ(loaded.report.state, State::kMemory);
    EXPECT_NE(loaded.report.reason.find("changed while it was read"),
              std::string::npos)
        << loaded.report.reason;
    // What was there in the end, and nothing on disk.
    ThreadPool pool(1);
    ExpectSameWeights(loaded.weights,
                      LoadWeights(TinyConfig(options_), source, pool, {}));
    EXPECT_TRUE(folder_.Names().empty());
  }
}

TEST_F(PackedWeightsTest, ProgressRisesToTheTotalAndMayStopTheLoad) {
  for (const State state : {State::kWritten, State::kReused}) {
    size_t last = 0, total = 0;
    const Loaded loaded = Load([&](size_t done, size_t all) {
      EXPECT_GE(done, last);
      last = done;
      total = all;
    });
    EXPECT_EQ(loaded.report.state, state);
    EXPECT_EQ(last, total);
    EXPECT_GT(total, 0u);
  }
  std::filesystem::remove(path_);
  size_t calls = 0;
  Load([&](size_t, size_t) { ++calls; });
  for (size_t stop = 1; stop <= calls; stop += 7) {
    std::filesystem::remove(path_);
    size_t call = 0;
    EXPECT_THROW(Load([&](size_t, size_t) {
                   if (++call == stop) throw std::runtime_error("enough");
                 }),
                 std::runtime_error);
    EXPECT_FALSE(std::filesystem::exists(path_ + ".part"));
  }
}

TEST_F(PackedWeightsTest, AWrongSourceIsAnErrorAsEver) {
  source_.tensors.erase("blk.3.ffn_down.weight");
  EXPECT_THROW(Load(), CorruptFile);
  EXPECT_TRUE(folder_.Names().empty());
}

// A source whose tensors stay where they are.
class HoldingSource : public IdentifiedSource {
 public:
  std::map<std::string, size_t> released;
  std::shared_ptr<const void> Hold(const TensorView& view) const override {
    return std::shared_ptr<const void>(mark, view.data);
  }
  void Release(const TensorView& view, size_t begin, size_t end) override {
    released[view.name] += end - begin;
  }
  std::shared_ptr<int> mark = std::make_shared<int>();
};

constexpr const char* kTable = "per_layer_token_embd.weight";

TEST(RowTableTest, RowsAreReadWhereTheSourceHasThem) {
  for (const TensorType type :
       {TensorType::kF32, TensorType::kBF16, TensorType::kQ8_0}) {
    TinyOptions options = TinyFamily("gemma4");
    options.types = {type};
    HoldingSource source;
    source.tensors = TinyTensors(options).tensors;
    const uint8_t* const place = source.tensors.at(kTable).bytes.data();
    const size_t bytes = source.tensors.at(kTable).bytes.size();
    TempFolder folder;
    {
      // Written: hashed once, though matrices are read twice.
      const Loaded loaded = gkv::Load(source, options, {folder.path()});
      EXPECT_EQ(loaded.report.state, State::kWritten);
      EXPECT_EQ(source.released[kTable], bytes);
      EXPECT_EQ(source.released["blk.0.attn_q.weight"],
                2 * source.tensors.at("blk.0.attn_q.weight").bytes.size());
      EXPECT_EQ(loaded.weights.ple_table.data, place);
      EXPECT_EQ(source.mark.use_count(), 2);
      const PackedFile file(loaded.report.path, loaded.weights.fingerprint);
      EXPECT_EQ(file.Find(kTable), nullptr);
      EXPECT_NE(file.Find("per_layer_model_proj.weight"), nullptr);
    }
    EXPECT_EQ(source.mark.use_count(), 1);
    source.released.clear();
    const Loaded again = gkv::Load(source, options, {folder.path()});
    EXPECT_EQ(again.report.state, State::kReused);
    EXPECT_EQ(again.weights.ple_table.data, place);
    EXPECT_TRUE(source.released.empty()) << "read again";
    // Quantizing leaves it as it is.
    const Loaded kept =
        gkv::Load(source, options,
                  {.folder = folder.path(),
                   .quantize = type == TensorType::kQ8_0
                                   ? std::nullopt
                                   : std::optional(TensorType::kQ4_0)});
    EXPECT_EQ(kept.weights.ple_table.type, type);
    EXPECT_EQ(kept.weights.ple_table.data, place);
  }
}

TEST(RowTableTest, ACopyOutlivesASourceThatHoldsNothing) {
  const TinyOptions options = TinyFamily("gemma4");
  std::vector<uint8_t> bytes;
  Weights weights;
  {
    MemorySource source = TinyTensors(options);
    bytes = source.tensors.at(kTable).bytes;
    ThreadPool pool(1);
    weights = LoadWeights(TinyConfig(options), source, pool, {});
    source.tensors.at(kTable).bytes.assign(bytes.size(), 0);
  }
  EXPECT_EQ(std::memcmp(weights.ple_table.data, bytes.data(), bytes.size()), 0);
  for (const MatrixInfo& matrix : weights.matrices) {
    EXPECT_NE(matrix.name, kTable) << "no product reads it";
  }
}

TEST(RowTableTest, ATableThatIsCutOffIsRefused) {
  const TinyOptions options = TinyFamily("gemma4");
  TempFolder folder;
  HoldingSource source;
  source.tensors = TinyTensors(options).tensors;
  (void)gkv::Load(source, options, {folder.path()});
  source.tensors.at(kTable).rows -= 1;
  for (const std::string& packed : {folder.path(), std::string()}) {
    try {
      ThreadPool pool(1);
      if (packed.empty()) {
        LoadWeights(TinyConfig(options), source, pool, {});
      } else {
        (void)gkv::Load(source, options, {packed});
      }
      FAIL() << "loaded";
    } catch (const CorruptFile& error) {
      EXPECT_TRUE(Says(error.what(),
                       {"test tensors", "per_layer_token_embd.weight",
                        "[99, 224]", "[100, 224]"}));
    }
  }
}

TEST(RowTableTest, ATableOfFloatsIsNothingToQuantize) {
  TinyOptions options = TinyFamily("gemma4");
  options.types = {TensorType::kQ8_0};
  MemorySource source = TinyTensors(options);
  MemorySource::Tensor& table = source.tensors.at(kTable);
  table.type = TensorType::kF32;
  table.bytes.assign(table.rows * RowBytes(table.type, table.cols), 0);
  ThreadPool pool(1);
  EXPECT_THROW(
      LoadWeights(TinyConfig(options), source, pool, {}, TensorType::kQ4_0),
      InvalidArgument);
}

}  // namespace
}  // namespace gkv
