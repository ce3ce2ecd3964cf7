#include "engine/engine.h"

#include <algorithm>
#include <list>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/fp_environment.h"
#include "base/heap_trim.h"
#include "base/inside_step.h"
#include "base/process.h"
#include "base/rng.h"
#include "base/worker.h"
#include "engine/embedder.h"
#include "engine/lookup_drafter.h"
#include "engine/row_consumer.h"
#include "engine/scheduler.h"
#include "engine/step_wait.h"
#include "io/gguf.h"
#include "model/config/config_gguf.h"
#include "model/draft_pass.h"
#include "model/embedding.h"
#include "ops/target.h"

namespace gkv {
namespace {

size_t ResolveThreads(size_t threads) {
  if (threads == 0) return ThreadPool::AvailableProcessors();
  if (threads > ThreadPool::kMaxThreads) {
    throw InvalidArgument(Unexpected(
        "threads", StrCat("at most ", ThreadPool::kMaxThreads), threads));
  }
  return threads;
}

// Returns the processors of pinned threads; none if threads are not pinned.
std::span<const Processor> ProcessorsOf(
    const std::shared_ptr<const PinnedProcessors>& pinned) {
  return pinned ? pinned->processors() : std::span<const Processor>();
}

// Returns the run locks of the jobs' caches, in the jobs' order. They are taken
// in one global order, so that two callers with the same caches cannot wait for
// each other. Returns none if `lock_cache` gives none for one of them.
std::vector<RunLock> LockCaches(
    std::span<const Engine::Job> jobs,
    const std::function<RunLock(Conversation&)>& lock_cache) {
  std::vector<size_t> order(jobs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return jobs[a].cache < jobs[b].cache;
  });
  std::vector<RunLock> locks(jobs.size());
  for (const size_t i : order) {
    locks[i] = lock_cache(*jobs[i].cache);
    if (!locks[i]) return {};
  }
  return locks;
}

using Clock = std::chrono::steady_clock;

// Returns when a job that was submitted at `called` ends at the latest.
std::optional<Clock::time_point> DeadlineOf(const Engine::Job& job,
                                            Clock::time_point called) {
  if (!job.options.deadline) return job.deadline;
  constexpr double kYears = 1e8;  // seconds: small enough to be added to a time
  const Clock::time_point own =
      called + std::chrono::duration_cast<Clock::duration>(
                   std::chrono::duration<double>(
                       std::min(*job.options.deadline, kYears)));
  return std::min(own, job.deadline.value_or(own));
}

// Throws InvalidArgument for two jobs with one cache, naming the first such
// job.
void CheckDistinct(std::span<const Engine::Job> jobs) {
  std::unordered_map<const Conversation*, size_t> rows;
  rows.reserve(jobs.size());
  std::optional<std::pair<size_t, size_t>> same;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const auto [first, is_new] = rows.try_emplace(jobs[i].cache.get(), i);
    if (!is_new && (!same || first->second < same->first)) {
      same = {first->second, i};
    }
  }
  if (!same) return;
  throw InvalidArgument(Unexpected(
      "caches", "one for each row of the batch (fork one)",
      StrCat("the same cache in rows ", same->first, " and ", same->second)));
}

// Ends the scheduler on another thread: a step that dropped the last reference
// to its model would wait for itself.
void EndElsewhere(std::unique_ptr<Scheduler> scheduler) noexcept {
  // Without a thread the scheduler stays.
  Scheduler* const last = scheduler.release();
  try {
    RunElsewhere([last] { delete last; });
  } catch (const std::exception&) {
  }
}

void CheckBinding(const Conversation& cache, const Hash128& identity) {
  const Hash128 bound = cache.fingerprint();
  if (bound != Hash128{} && bound != identity) {
    throw OtherFingerprint("the cache holds keys and values", bound.Hex(),
                           identity.Hex());
  }
}

Hash128 FingerprintOf(const Weights& weights, uint32_t numerics_id) {
  Hasher hasher;
  hasher.UpdateValue(weights.fingerprint.low);
  hasher.UpdateValue(weights.fingerprint.high);
  hasher.UpdateValue(numerics_id);
  return hasher.Finish();
}

}  // namespace

Engine::Engine(ModelConfig config, Weights weights, size_t num_threads,
               std::shared_ptr<const PinnedProcessors> pinned,
               PackedReport packed_report, const LoadOptions& options)
    : model_(std::make_shared<Model>(std::move(config), std::move(weights))),
      num_threads_(num_threads),
      pinned_(std::move(pinned)),
      packed_report_(std::move(packed_report)),
      scheduler_options_(options.scheduler),
      profiled_(options.profile),
      shared_(std::make_shared<Shared>()) {}

Engine::Engine(const Engine&) = default;

Engine::~Engine() = default;

Engine::Shared::~Shared() {
  // After fork() the scheduler's thread exists in the parent only.
  if (scheduler && scheduler_process.InChild()) (void)scheduler.release();
  if (embedder && embedder_process.InChild()) (void)embedder.release();
  if (scheduler && InsideStep::Runner() != nullptr) {
    EndElsewhere(std::move(scheduler));
  }
}

const Scheduler* Engine::Shared::own_scheduler() const {
  return scheduler_process.InChild() ? nullptr : scheduler.get();
}

const Embedder* Engine::Shared::own_embedder() const {
  return embedder_process.InChild() ? nullptr : embedder.get();
}

std::shared_ptr<Engine> Engine::Load(const std::string& gguf_path,
                                     const LoadOptions& options) {
  GgufFile file(gguf_path);
  const ModelConfig config = ConfigFromGguf(file);
  // The tokenizer comes first: one that is refused costs no load of weights.
  std::shared_ptr<TokenText> text;
  if (file.Has("tokenizer.ggml.tokens") && !Vocabulary::HasMerges(file)) {
    text = std::make_shared<TokenText>(Vocabulary(file).Text());
  }
  std::shared_ptr<Engine> gemma = FromTensors(config, file, options);
  if (text) gemma->set_token_text(std::move(text));
  TrimHeap();
  return gemma;
}

std::shared_ptr<Engine> Engine::FromTensors(const ModelConfig& config,
                                            TensorSource& source,
                                            const LoadOptions& options) {
  config.Validate();
  options.scheduler.Validate();
  const size_t threads = ResolveThreads(options.threads);
  std::shared_ptr<const PinnedProcessors> pinned;
  if (options.pin_threads) {
    pinned = std::make_shared<PinnedProcessors>(
        threads, PlacementOrder(DescribeProcessors(AllowedProcessors())));
  }
  ThreadPool pool(threads, ProcessorsOf(pinned));
  const std::unique_ptr<ScopedPin> pin = PinTo(ProcessorsOf(pinned));
  PackedReport report;
  Weights weights =
      options.packed_folder.empty()
          ? LoadWeights(config, source, pool, options.progress,
                        options.quantize)
          : LoadPackedWeights(
                config, source, pool, options.progress,
                {.folder = options.packed_folder, .quantize = options.quantize},
                report);
  return std::shared_ptr<Engine>(new Engine(config, std::move(weights), threads,
                                            std::move(pinned),
                                            std::move(report), options));
}

Hash128 Engine::fingerprint() const {
  return FingerprintOf(model_->weights, NumericsId());
}

Hash128 Engine::weights_fingerprint() const {
  // This was `fingerprint` in the first version, on most processors: what is
  // named by it is found again.
  return FingerprintOf(model_->weights, uint32_t{1});
}

std::shared_ptr<PrefixView> Engine::MakePrefixView(
    std::shared_ptr<PrefixCache> cache, std::span<const uint8_t> salt) const {
  return std::make_shared<PrefixView>(std::move(cache), fingerprint(), salt,
                                      config().eos_ids);
}

std::shared_ptr<Engine> Engine::WithPrefix(
    std::shared_ptr<PrefixView> view) const {
  const std::shared_ptr<Engine> other(new Engine(*this));
  if (view) other->tenant_ = view->salt();
  other->prefix_.view = std::move(view);
  return other;
}

std::shared_ptr<Engine> Engine::WithSalt(std::span<const uint8_t> salt) const {
  const std::shared_ptr<Engine> other(new Engine(*this));
  other->tenant_ = SaltDigest(salt);
  return other;
}

bool Engine::CheckAhead(double seconds) const {
  const auto& file = model_->weights.file;
  const std::chrono::duration<double> time(seconds);
  return file &&
         file->CheckAhead(Clock::now() +
                          std::chrono::duration_cast<Clock::duration>(time));
}

std::shared_ptr<Engine> Engine::WithDraft(
    const std::shared_ptr<const Engine>& draft) const {
  const std::shared_ptr<Engine> other(new Engine(*this));
  other->draft_ = nullptr;
  if (!draft) return other;
  if (draft->model_ == model_) {
    throw InvalidArgument(
        "draft: expected a smaller model, which takes less time, found the "
        "model itself");
  }
  RequireConversations(config());
  if (draft->config().target_hidden != 0) {
    RequireDrafterFor(draft->config(), config());
  }
  if (draft->config().bidirectional) {
    throw InvalidArgument(
        "draft: expected a model that generates, found one that makes "
        "embeddings of texts");
  }
  if (draft->config().vocab_size != config().vocab_size) {
    throw Mismatch(StrCat("the draft has a vocabulary of ",
                          draft->config().vocab_size,
                          " tokens, expected that of the model, of ",
                          config().vocab_size));
  }
  const std::shared_ptr<const TokenText> own = token_text();
  const std::shared_ptr<const TokenText> theirs = draft->token_text();
  if (own && theirs && !(*own == *theirs)) {
    throw Mismatch(
        "the tokens of the draft stand for other text than the model's, "
        "expected the same vocabulary");
  }
  other->draft_ = draft->model_;
  return other;
}

std::shared_ptr<const TokenText> Engine::token_text() const {
  MutexLock lock(shared_->mutex);
  return shared_->token_text;
}

void Engine::set_token_text(std::shared_ptr<const TokenText> text) {
  MutexLock lock(shared_->mutex);
  shared_->token_text = std::move(text);
}

Engine::Stats Engine::stats() const {
  Stats stats;
  MutexLock lock(shared_->mutex);
  if (const Scheduler* const scheduler = shared_->own_scheduler()) {
    stats = {scheduler->steps(), scheduler->parallel_loops(),
             scheduler->preemptions(), scheduler->draft_rows(),
             scheduler->looks()};
  }
  if (const Embedder* const embedder = shared_->own_embedder()) {
    stats.steps += embedder->steps();
  }
  return stats;
}

ThreadPlacement Engine::placement() const {
  const std::span<const Processor> own = ProcessorsOf(pinned_);
  if (!own.empty()) {
    return {num_threads_, true, std::vector(own.begin(), own.end())};
  }
  return {num_threads_, false, DescribeProcessors(AllowedProcessors())};
}

StepProfile Engine::profile() const {
  if (!profiled_) {
    throw InvalidArgument(
        "the model: its steps are not timed; expected one that was loaded "
        "with profile");
  }
  constexpr auto kEmbedding = static_cast<size_t>(StepPhase::kEmbedding);
  MutexLock lock(shared_->mutex);
  StepProfile profile;
  // The parent's scheduler and embedder may be locked for ever.
  if (const Scheduler* const scheduler = shared_->own_scheduler()) {
    profile = scheduler->profile();
  }
  if (const Embedder* const embedder = shared_->own_embedder()) {
    profile.phases[kEmbedding] = embedder->profile().phases[kEmbedding];
  }
  return profile;
}

Scheduler& Engine::scheduler() {
  Shared& shared = *shared_;
  MutexLock lock(shared.mutex);
  if (shared.scheduler && shared.scheduler_process.InChild()) {
    // Its threads stayed in the parent: nothing of it can be reused or freed.
    (void)shared.scheduler.release();
  }
  if (!shared.scheduler) {
    shared.scheduler = std::make_unique<Scheduler>(
        model_, num_threads_, scheduler_options_, profiled_,
        ProcessorsOf(pinned_));
    shared.scheduler_process = OwnProcess();
  }
  return *shared.scheduler;
}

Embedder& Engine::embedder() {
  Shared& shared = *shared_;
  MutexLock lock(shared.mutex);
  if (shared.embedder && shared.embedder_process.InChild()) {
    (void)shared.embedder.release();
  }
  if (!shared.embedder) {
    shared.embedder =
        std::make_unique<Embedder>(model_, num_threads_, profiled_,
                                   ProcessorsOf(pinned_));
    shared.embedder_process = OwnProcess();
  }
  return *shared.embedder;
}

void Engine::CheckTokens(const Conversation& cache,
                         std::span<const int32_t> tokens) const {
  if (tokens.empty() && cache.length() == 0) {
    throw InvalidArgument(
        "prompt: expected at least one token for an empty cache, found none");
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 ||
        static_cast<size_t>(tokens[i]) >= config().vocab_size) {
      throw InvalidArgument(Unexpected(
          "prompt", StrCat("token ids in 0..", config().vocab_size - 1),
          StrCat(tokens[i], " at index ", i)));
    }
  }
}

void Engine::CheckCache(const Conversation& cache) const {
  RequireConversations(config());
  const KvLayout& layout = cache.layout();
  const std::shared_ptr<const KvLayout> expected =
      config().MakeKvLayout(layout.dtype(), layout.block_tokens());
  if (layout.hash() != expected->hash()) {
    const auto name = [](const std::string& model) {
      return model.empty() ? std::string("a custom model") : model;
    };
    const size_t layers = layout.layers().size();
    const bool as_deep = layers == config().num_layers();
    throw Mismatch(StrCat(
        "the cache was made for ", name(cache.model_type()), " (", layers,
        " layers), expected one for ", name(config().name), " (",
        config().num_layers(), " layers)", as_deep ? "; " : "",
        as_deep ? FirstDifference(layout, *expected) : std::string()));
  }
}

void Engine::CheckFits(const Conversation& cache) const {
  CheckCache(cache);
  CheckBinding(cache, fingerprint());
}

std::vector<std::shared_ptr<TokenStream>> Engine::Start(
    std::span<const Job> jobs, const std::function<void()>& poll) {
  return StartLocked(jobs,
                     [&](Conversation& cache) { return cache.Lock(poll); });
}

std::vector<std::shared_ptr<TokenStream>> Engine::TryStart(
    std::span<const Job> jobs, LockWait& wait,
    const RunGate::Callback& on_free) {
  return StartLocked(
      jobs, [&](Conversation& cache) { return cache.TryLock(wait, on_free); });
}

std::vector<std::shared_ptr<TokenStream>> Engine::StartLocked(
    std::span<const Job> jobs,
    const std::function<RunLock(Conversation&)>& lock_cache) {
  const Clock::time_point called = Clock::now();
  CheckDistinct(jobs);
  const std::shared_ptr<const TokenText> text = token_text();
  for (const Job& job : jobs) {
    job.options.Validate(config().vocab_size);
    if (job.options.speculate == Speculate::kDraft && !draft_) {
      throw InvalidArgument(
          "speculate: expected 'off' or 'lookup' for a model that was loaded "
          "without draft=, found 'draft'");
    }
    const bool stops =
        !job.options.stop.empty() || !job.options.reply_stop.empty();
    if (stops && text == nullptr) {
      throw InvalidArgument(
          "stop: expected none for a model without a tokenizer, which takes "
          "stop_token_ids, found strings");
    }
    CheckCache(*job.cache);
  }
  std::vector<RunLock> locks = LockCaches(jobs, lock_cache);
  if (locks.size() != jobs.size()) return {};
  const Hash128 identity = fingerprint();
  const auto prompt_of = [](const Job& job) {
    const bool drops = job.optional_bos && job.cache->length() > 0;
    return job.prompt.subspan(drops ? 1 : 0);
  };
  for (const Job& job : jobs) {
    CheckTokens(*job.cache, prompt_of(job));
    CheckBinding(*job.cache, identity);
  }
  std::vector<std::shared_ptr<TokenStream>> streams;
  std::list<Request> requests;
  const auto batch = std::make_shared<Batch>();
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Job& job = jobs[i];
    const uint64_t seed =
        job.options.seed ? *job.options.seed : RandomSeed();
    streams.push_back(std::make_shared<TokenStream>(
        job.cache, std::move(locks[i]), prompt_of(job),
        TokenStream::Options{job.streamed, job.options.WantsLogprobs(),
                             job.options.top_logprobs, seed, text}));
    Request::Parts parts{.stream = streams.back()};
    parts.stop_ids = job.options.stop_token_ids;
    if (!job.options.ignore_eos) {
      parts.stop_ids.insert(parts.stop_ids.end(), config().eos_ids.begin(),
                            config().eos_ids.end());
    }
    parts.deadline = DeadlineOf(job, called);
    parts.prefix = job.prefix;
    if (!parts.prefix.view) {
      parts.prefix.view = prefix_.view;
      parts.prefix.mode = job.options.prefix_cache;
    }
    GuessSources& guessed_by = parts.guessed_by;
    guessed_by.tenant = job.prefix.view ? job.prefix.view->salt() : tenant_;
    guessed_by.drafter = job.drafter;
    if (!guessed_by.drafter && job.options.speculate == Speculate::kLookup) {
      const PrefixMode mode = parts.prefix.mode;
      const LookupDrafter::Sharing sharing{
          .history = scheduler().HistoryOf(guessed_by.tenant),
          .reads = mode == PrefixMode::kRead || mode == PrefixMode::kOn,
          .writes = mode == PrefixMode::kWrite || mode == PrefixMode::kOn};
      guessed_by.drafter = std::make_shared<LookupDrafter>(sharing);
    }
    if (!guessed_by.drafter && job.options.speculate == Speculate::kDraft) {
      guessed_by.model = draft_;
    }
    if (job.constraint) parts.constraint = job.constraint->Clone();
    guessed_by.forced = job.options.speculate != Speculate::kOff;
    if (jobs.size() > 1 && !job.streamed) parts.batch = batch;
    if (job.options.max_tokens > 0 &&
        job.cache->length() < job.cache->capacity_tokens()) {
      std::vector<int32_t> transcript;
      if (Sampler::ReadsTranscript(job.options)) {
        transcript = job.cache->tokens();
      }
      parts.consumer = std::make_unique<TokenSampler>(
          job.options, seed, transcript, job.constraint != nullptr,
          parts.stop_ids, text);
    }
    requests.emplace_back(std::move(parts));
  }
  for (const Job& job : jobs) job.cache->Bind(identity);
  scheduler().Submit(std::move(requests));
  return streams;
}

std::shared_ptr<TokenStream> Engine::StartRows(
    const std::shared_ptr<Conversation>& cache, std::span<const int32_t> tokens,
    RowOutput::Kind kind, bool all_positions, float* rows,
    const std::function<void()>& poll, const PrefixAccess& prefix) {
  if (tokens.empty()) {
    throw InvalidArgument(Unexpected("tokens", "at least one", "none"));
  }
  CheckCache(*cache);
  RunLock lock = cache->Lock(poll);
  CheckTokens(*cache, tokens);
  const Hash128 identity = fingerprint();
  CheckBinding(*cache, identity);
  const auto stream = std::make_shared<TokenStream>(
      cache, std::move(lock), tokens, TokenStream::Options{});
  const size_t count = all_positions ? tokens.size() : 1;
  std::list<Request> requests;
  Request::Parts parts{.stream = stream};
  parts.consumer = std::make_unique<RowWriter>(RowOutput{kind, count, rows});
  parts.output_rows = count;
  parts.prefix = prefix.view ? prefix : prefix_;
  requests.emplace_back(std::move(parts));
  cache->Bind(identity);
  scheduler().Submit(std::move(requests));
  return stream;
}

GenerateResult Engine::Generate(
    const std::shared_ptr<Conversation>& cache, std::span<const int32_t> prompt,
    const GenerateOptions& options,
    const std::function<bool(const TokenEvent&)>& on_token) {
  // A stream alone does not say whether anybody will wait for it.
  std::optional<StepWait> waits;
  if (on_token) waits.emplace(scheduler().Waiting());
  const Job job{cache, prompt, options, on_token != nullptr};
  const std::shared_ptr<TokenStream> stream = Start({&job, 1})[0];
  try {
    bool reads = on_token != nullptr;
    while (reads && !stream->Drained()) {
      const std::optional<TokenEvent> event = stream->NextEvent();
      if (event && !on_token(*event)) {
        stream->Stop(TokenStream::Interrupt::kCancel);
        reads = false;
      }
    }
  } catch (...) {
    stream->Abort();
    throw;
  }
  stream->WaitDone();
  try {
    GenerateResult result = stream->Result();
    stream->Confirm();
    return result;
  } catch (...) {
    // Without memory for the result nothing has happened, but for what
    // `on_token` has.
    if (!on_token) stream->Abort();
    throw;
  }
}

std::vector<float> Engine::DraftLogits(std::span<const int32_t> tokens,
                                       size_t guesses,
                                       const std::function<void()>& poll) {
  if (!draft_ || draft_->config.target_hidden == 0) {
    throw InvalidArgument(
        "the model has no drafter: expected one that was loaded with draft=");
  }
  CheckRange(guesses, 1, kMaxDraftLogits, "guesses");
  if (tokens.size() < 2) {
    throw InvalidArgument(Unexpected("tokens", "at least 2", tokens.size()));
  }
  const auto cache =
      CreateConversation(config(), {.capacity_tokens = tokens.size(),
                                    .kv_dtype = KvDtype::kF32,
                                    .checkpoint_bytes = 0});
  CheckTokens(*cache, tokens);
  std::vector<float> state(config().hidden_size);
  StartRows(cache, tokens.first(tokens.size() - 1), RowOutput::kHidden, false,
            state.data(), poll, {.mode = PrefixMode::kOff})
      ->WaitDone();
  const RunLock lock = cache->Lock(poll);
  const std::optional<KvStepView> view = cache->View(lock);
  ThreadPool pool(num_threads_);
  const ScopedFpEnvironment fp_environment;
  DraftPass pass(*draft_, *model_, pool);
  const size_t vocab = config().vocab_size;
  std::vector<float> logits(guesses * vocab);
  int32_t token = tokens.back();
  for (size_t i = 0; i < guesses; ++i) {
    float* const row = logits.data() + i * vocab;
    const DraftPass::Row input{.view = &*view,
                               .layout = &cache->layout(),
                               .token = token,
                               .state = state.data(),
                               .next = state.data(),
                               .logits = row};
    pass.Run({&input, 1});
    token = static_cast<int32_t>(std::max_element(row, row + vocab) - row);
  }
  return logits;
}

void Engine::CheckTexts(std::span<const std::span<const int32_t>> texts) const {
  const size_t longest = config().context_length;
  for (size_t t = 0; t < texts.size(); ++t) {
    if (texts[t].empty() || texts[t].size() > longest) {
      throw InvalidArgument(
          Unexpected(StrCat("texts[", t, "]"),
                     StrCat("1..", longest, " tokens"), texts[t].size()));
    }
    for (size_t i = 0; i < texts[t].size(); ++i) {
      const int32_t id = texts[t][i];
      if (id >= 0 && static_cast<size_t>(id) < config().vocab_size) continue;
      throw InvalidArgument(
          Unexpected(StrCat("texts[", t, "]"),
                     StrCat("token ids in 0..", config().vocab_size - 1),
                     StrCat(id, " at index ", i)));
    }
  }
}

std::vector<float> Engine::Embed(
    std::span<const std::span<const int32_t>> texts,
    const EmbedOptions& options, const std::function<void()>& poll) {
  const std::vector<size_t> dims = EmbeddingDims(config());
  const size_t size = VectorSize(config());
  const size_t dim = options.dim == 0 ? size : options.dim;
  if (std::find(dims.begin(), dims.end(), dim) == dims.end()) {
    std::string known;
    for (const size_t d : dims) known += StrCat(known.empty() ? "" : ", ", d);
    throw InvalidArgument(Unexpected(
        "dim", StrCat(dims.size() > 1 ? "one of " : "", known), dim));
  }
  if (config().bidirectional != (options.pooling == Pooling::kModel)) {
    throw InvalidArgument(
        config().bidirectional
            ? "pooling: expected none, since this model is trained for the "
              "mean, found one"
            : "pooling: expected 'mean' or 'last', for the hidden states of a "
              "model that is not trained to give embeddings, found none");
  }
  CheckTexts(texts);
  std::vector<float> whole(texts.size() * size);
  if (config().bidirectional) {
    embedder().Embed(texts, whole.data(), poll);
  } else {
    ComputeHiddenStates(texts, options.pooling, whole.data(), poll);
  }
  // This works in place: a vector ends no later than the one that it is made
  // of.
  for (size_t t = 0; t < texts.size(); ++t) {
    UnitVector(whole.data() + t * size, dim, whole.data() + t * dim);
  }
  whole.resize(texts.size() * dim);
  return whole;
}

// Writes `out` [texts.size(), hidden_size], in portions of a few thousand
// tokens, so that only the hidden states and caches of one portion are held.
void Engine::ComputeHiddenStates(
    std::span<const std::span<const int32_t>> texts, Pooling pooling,
    float* out, const std::function<void()>& poll) {
  constexpr size_t kPortionTokens = 4096;
  constexpr std::chrono::milliseconds kPollInterval{50};
  const size_t hidden = config().hidden_size;
  const bool all = pooling == Pooling::kMean;
  const PrefixAccess unshared = {.view = prefix_.view,
                                 .mode = PrefixMode::kOff};
  for (size_t first = 0; first < texts.size();) {
    size_t end = first, tokens = 0;
    std::vector<std::shared_ptr<TokenStream>> streams;
    std::vector<std::vector<float>> states;
    try {
      do {
        const size_t length = texts[end].size();
        tokens += length;
        states.emplace_back((all ? length : 1) * hidden);
        streams.push_back(
            StartRows(CreateConversation(config(), {.capacity_tokens = length,
                                                    .kv_dtype = KvDtype::kF32,
                                                    .checkpoint_bytes = 0}),
                      texts[end], RowOutput::kHidden, all, states.back().data(),
                      poll, unshared));
        ++end;
      } while (end < texts.size() &&
               tokens + texts[end].size() <= kPortionTokens);
      for (const auto& stream : streams) {
        while (!stream->WaitDone(kPollInterval)) {
          if (poll) poll();
        }
        (void)stream->Result();  // throws if it failed
      }
    } catch (...) {
      for (const auto& stream : streams) stream->Abort();
      throw;
    }
    const ScopedFpEnvironment fp_environment;
    for (size_t t = first; t < end; ++t) {
      const std::vector<float>& rows = states[t - first];
      std::vector<double> sums(hidden);
      for (size_t at = 0; at < rows.size(); at += hidden) {
        AddToSums(rows.data() + at, hidden, sums.data());
      }
      const auto count = static_cast<double>(rows.size() / hidden);
      for (size_t i = 0; i < hidden; ++i) {
        out[t * hidden + i] = static_cast<float>(sums[i] / count);
      }
    }
    first = end;
  }
}

}  // namespace gkv
