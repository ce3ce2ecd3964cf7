#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/numpy_source.h"
#include "bindings/waker.h"
#include "engine/engine.h"
#include "io/tensor_files.h"
#include "model/embedding.h"

// Registers the engine (Gemma, called Engine in Python) and what its calls
// give.
//
// Start() makes a Call, which holds the token streams of its requests, one if
// it is streamed. Without a bell it waits for the locks of the caches and, if
// the call is not streamed, until all requests have ended. With a bell it waits
// for nothing: the bell rings when a cache is free, and later when there are
// events or the end. Whatever waits releases the interpreter's lock and looks
// for Ctrl-C every kSignalInterval. Threads of the engine take the lock only to
// run code of users (bindings.h). A streamed Call that is destroyed early
// cancels its requests; any other undoes them, unless their results were taken.

namespace gkv {
namespace {

using Progress = std::optional<py::function>;

// How long a waiting thread goes without looking for Ctrl-C.
constexpr std::chrono::milliseconds kSignalInterval{50};

const char* NameOf(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kDeadline:
      return "deadline";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kLength:
    case FinishReason::kNone:
      return "length";
  }
  return "";
}

std::span<const int32_t> SpanOf(const TokenArray& tokens) {
  return {tokens.data(), static_cast<size_t>(tokens.size())};
}

// Returns the type to quantize to; none for "".
std::optional<TensorType> TargetOf(const std::string& quantize) {
  if (quantize.empty()) return std::nullopt;
  return QuantizeTargetFromName(quantize);
}

using Streams = std::vector<std::shared_ptr<TokenStream>>;

bool AllDone(const Streams& streams) {
  return std::all_of(streams.begin(), streams.end(),
                     [](const auto& stream) { return stream->done(); });
}

size_t ProgressOf(const Streams& streams) {
  size_t tokens = 0;
  for (const auto& stream : streams) tokens += stream->progress();
  return tokens;
}

std::vector<GenerateResult> ResultsOf(const Streams& streams) {
  std::vector<GenerateResult> results;
  for (const auto& stream : streams) results.push_back(stream->Result());
  return results;
}

// Waits for requests, with the interpreter's lock released. Calls poll(false)
// now and then, and poll(true) when all have succeeded. If that throws, or if a
// request fails, all are undone: their caches are as before the call. Until the
// streams are confirmed a later abort undoes them, too, and the former content
// of the caches holds its blocks.
void WaitAll(const Streams& streams, const std::function<void(bool)>& poll) {
  try {
    for (const auto& stream : streams) {
      while (!stream->WaitDone(kSignalInterval)) poll(false);
      (void)stream->Result();
    }
    poll(true);
  } catch (...) {
    for (const auto& stream : streams) stream->Abort();
    throw;
  }
}

std::vector<Engine::Job> JobsOf(
    const std::vector<std::shared_ptr<Conversation>>& caches,
    const std::vector<TokenArray>& prompts,
    const std::vector<GenerateOptions>& options,
    const std::vector<bool>& optional_bos,
    const std::vector<std::vector<size_t>>& boundaries,
    const std::vector<py::object>& constraints, bool streamed) {
  if (caches.size() != prompts.size() || caches.size() != options.size()) {
    throw InvalidArgument(Unexpected(
        "caches", "as many as prompts and options",
        StrCat(caches.size(), ", ", prompts.size(), " prompts and ",
               options.size(), " options")));
  }
  std::vector<Engine::Job> jobs;
  for (size_t i = 0; i < caches.size(); ++i) {
    jobs.push_back(
        {.cache = caches[i],
         .prompt = SpanOf(prompts[i]),
         .options = options[i],
         .streamed = streamed,
         .optional_bos = i < optional_bos.size() && optional_bos[i]});
    if (i < boundaries.size()) jobs.back().prefix.boundaries = boundaries[i];
    if (i < constraints.size()) {
      jobs.back().constraint = ConstraintOf(constraints[i]);
    }
  }
  return jobs;
}

py::array_t<float> Logits(Engine& gemma,
                          const std::shared_ptr<Conversation>& cache,
                          const TokenArray& tokens, bool all_positions,
                          const Progress& progress) {
  const auto rows = all_positions ? tokens.size() : py::ssize_t{1};
  const auto vocab_size = static_cast<py::ssize_t>(gemma.config().vocab_size);
  std::vector<py::ssize_t> shape = {vocab_size};
  if (all_positions) shape.insert(shape.begin(), rows);
  py::array_t<float> logits(shape);
  float* out = logits.mutable_data();
  {
    const GilReleased no_gil;
    const auto poll = [&] {
      CheckSignals();
      if (progress) WithGil([&] { CallPython(*progress); });
    };
    const Streams streams = {gemma.StartLogits(cache, SpanOf(tokens),
                                               all_positions, out, poll)};
    WaitAll(streams, [&](bool) { poll(); });
    streams[0]->Confirm();
  }
  return logits;
}

// Returns the pooling of this name; for "" the one that the model is trained
// for.
Pooling PoolingOf(const std::string& name) {
  if (name.empty()) return Pooling::kModel;
  if (name == "mean") return Pooling::kMean;
  if (name == "last") return Pooling::kLast;
  throw InvalidArgument(
      Unexpected("pooling", "'mean' or 'last'", StrCat("'", name, "'")));
}

py::array_t<float> DraftLogits(Engine& gemma, const TokenArray& tokens,
                               size_t guesses) {
  const std::span<const int32_t> ids = SpanOf(tokens);
  std::vector<float> logits =
      WithoutGil([&] { return gemma.DraftLogits(ids, guesses, CheckSignals); });
  return ArrayOf(std::move(logits), {guesses, gemma.config().vocab_size});
}

py::array_t<float> Embed(Engine& gemma, const std::vector<TokenArray>& texts,
                         size_t dim, const std::string& pooling,
                         const Progress& progress) {
  std::vector<std::span<const int32_t>> spans;
  for (const TokenArray& text : texts) spans.push_back(SpanOf(text));
  const EmbedOptions options{dim, PoolingOf(pooling)};
  std::vector<float> vectors = WithoutGil([&] {
    return gemma.Embed(spans, options, [&] {
      CheckSignals();
      if (progress) WithGil([&] { CallPython(*progress); });
    });
  });
  const size_t whole = dim == 0 ? VectorSize(gemma.config()) : dim;
  return ArrayOf(std::move(vectors), {texts.size(), whole});
}

// A call of the engine, which may still run. It has one stream if it is
// streamed. Its destructor cancels a streamed call, and undoes any other whose
// results were not taken. Only Next(), Wait() and Result() wait.
class Call {
 public:
  Call(Streams streams, bool streamed)
      : streams_(std::move(streams)), streamed_(streamed) {}
  ~Call() {
    if (streamed_) {
      Cancel(kAll);
    } else if (!taken_) {
      Abort();
    }
    Confirm();
  }
  Call(Call&&) = default;

  static constexpr size_t kAll = std::numeric_limits<size_t>::max();

  // Next(), Wait() and Result() require that the interpreter's lock is not held
  // if they wait.
  std::optional<TokenEvent> Next(double timeout_s) {
    TokenStream& stream = *streams_[0];
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration<double>(timeout_s);
    const bool waits = timeout_s > 0;
    if (waits) WakeAll({this});  // earlier reads may not have waited
    while (true) {
      if (auto event = stream.NextEvent(
              waits ? kSignalInterval : std::chrono::milliseconds(0), waits)) {
        return event;
      }
      if (waits) CheckSignals();
      if (stream.Drained()) {
        (void)stream.Result();  // throws if the request failed
        return std::nullopt;
      }
      if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
    }
  }
  // Returns all events that are there, and whether these were the last. Once
  // there are none, throws the error that the request failed with. Does not
  // wait.
  std::pair<std::vector<TokenEvent>, bool> Take() {
    TokenStream& stream = *streams_[0];
    std::vector<TokenEvent> events;
    while (auto event = stream.NextEvent(std::chrono::milliseconds(0), false)) {
      events.push_back(*std::move(event));
    }
    const bool drained = stream.Drained();
    if (drained && events.empty()) (void)stream.Result();
    return {std::move(events), drained};
  }
  void Wait(const Progress& progress) {
    WaitAll(streams_, [&](bool ended) {
      CheckSignals();
      if (!progress) return;
      WithGil([&] { CallPython(*progress, ProgressOf(streams_), ended); });
    });
  }
  GenerateResult Result() {
    while (!streams_[0]->WaitDone(kSignalInterval)) CheckSignals();
    return streams_[0]->Result();
  }

  void Cancel(size_t read) {
    for (const auto& stream : streams_) {
      stream->Stop(TokenStream::Interrupt::kCancel, read);
    }
  }
  void Abort() {
    for (const auto& stream : streams_) {
      stream->Stop(TokenStream::Interrupt::kAbort);
    }
  }
  // Whether nothing more comes before somebody reads.
  bool WaitsForReader() const {
    const TokenStream& stream = *streams_[0];
    return stream.waits_for_reader() || (stream.done() && !stream.Drained());
  }
  bool done() const { return AllDone(streams_); }
  void PrepareToWait() const { streams_[0]->PrepareToWait(); }
  size_t progress() const { return ProgressOf(streams_); }
  size_t cached_tokens() const { return streams_[0]->cached_tokens(); }
  // Returns the first position of the prompt and the one after its last.
  std::pair<size_t, size_t> prompt_range() const {
    return {streams_[0]->prompt_begin(), streams_[0]->prompt_end()};
  }
  std::vector<GenerateResult> Results() {
    auto results = ResultsOf(streams_);
    taken_ = true;
    Confirm();
    return results;
  }
  // Lets calls go on after reads that did not wait. All are acknowledged before
  // one is notified, so that their next tokens share a step.
  static void WakeAll(const std::vector<Call*>& calls) {
    std::vector<TokenStream*> waited_for;
    for (Call* call : calls) {
      TokenStream* const stream = call->streams_[0].get();
      if (stream->Acknowledge()) waited_for.push_back(stream);
    }
    for (TokenStream* stream : waited_for) stream->Notify();
  }
  // Visits, once each, the exceptions that Python code of the requests raised.
  // They are kept here to be raised again, and refer to this call by the frames
  // of their tracebacks. The garbage collector must see that cycle. Requires:
  // the interpreter's lock is held.
  template <typename Visit>
  int VisitRaised(const Visit& visit) const {
    std::vector<std::exception_ptr> seen;
    for (const auto& stream : streams_) {
      std::exception_ptr error = stream->failure();
      if (std::find(seen.begin(), seen.end(), error) != seen.end()) continue;
      if (PyObject* const value = RaisedFor(this, error)) {
        if (const int stop = visit(value)) return stop;
        seen.push_back(std::move(error));
      }
    }
    return 0;
  }
  void ForgetRaised() {
    std::vector<std::exception_ptr> gone;
    for (const auto& stream : streams_) {
      if (RaisedFor(this, stream->failure()) != nullptr) {
        gone.push_back(stream->TakeFailure());
      }
    }
  }
  // `bell` rings when there is an event, or the end.
  void Watch(const Bell& bell) {
    for (const auto& stream : streams_) {
      stream->set_on_change([ring = bell.ring()] { (*ring)(); });
    }
  }

 private:
  void Confirm() {
    for (const auto& stream : streams_) stream->Confirm();
  }

  Streams streams_;
  bool streamed_;
  bool taken_ = false;  // the results
};

// Returns (ids, log-probabilities) [rows, n], or [n] for 0 rows; None if there
// are none.
py::object TopArrays(std::span<const TokenLogprob> top, size_t rows) {
  if (top.empty()) return py::none();
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  for (const TokenLogprob& token : top) {
    ids.push_back(token.id);
    logprobs.push_back(token.logprob);
  }
  std::vector<size_t> shape = {top.size() / std::max(rows, size_t{1})};
  if (rows > 0) shape.insert(shape.begin(), rows);
  return py::make_tuple(ArrayOf(std::move(ids), shape),
                        ArrayOf(std::move(logprobs), shape));
}

py::object FinishReasonOf(const TokenEvent& event) {
  if (event.finish_reason == FinishReason::kNone) return py::none();
  return py::str(NameOf(event.finish_reason));
}

py::object LogprobOf(const TokenEvent& event) {
  if (std::isnan(event.logprob)) return py::none();
  return py::float_(event.logprob);
}

// Takes events as plain tuples in one call. A server does this with every
// token.
py::tuple TakeEvents(Call& call) {
  const auto [events, drained] = call.Take();
  py::list found;
  for (const TokenEvent& event : events) {
    found.append(py::make_tuple(py::bytes(event.text), event.token_id,
                                LogprobOf(event), FinishReasonOf(event),
                                TopArrays(event.top_logprobs, 0)));
  }
  return py::make_tuple(std::move(found), drained);
}

// Returns the Call of a Python object; null while that is being made.
Call* CallOf(PyObject* object) {
  auto* const instance = reinterpret_cast<py::detail::instance*>(object);
  py::detail::value_and_holder made = instance->get_value_and_holder();
  return made.holder_constructed() ? made.value_ptr<Call>() : nullptr;
}

// Lets Python's garbage collector look into calls.
void CollectCalls(PyHeapTypeObject* heap_type) {
  PyTypeObject* const type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const Call* const call = CallOf(self);
    if (call == nullptr) return 0;
    return call->VisitRaised(
        [&](PyObject* value) { return visit(value, arg); });
  };
  type->tp_clear = [](PyObject* self) {
    if (Call* const call = CallOf(self)) call->ForgetRaised();
    return 0;
  };
}

// Starts a call. With a bell it waits for nothing: it returns none if a cache
// is in use, and the bell rings when that is free. Without a bell, a call that
// is not streamed has ended when this returns. So a KeyboardInterrupt, which
// Python raises between any two of its own steps, never comes while the caches
// are in use.
std::optional<Call> Start(
    Engine& gemma, const std::vector<std::shared_ptr<Conversation>>& caches,
    const std::vector<TokenArray>& prompts,
    const std::vector<GenerateOptions>& options, bool streamed, Bell* bell,
    const std::vector<bool>& optional_bos,
    const std::vector<std::vector<size_t>>& boundaries,
    const std::vector<py::object>& constraints, const Progress& progress) {
  const std::vector<Engine::Job> jobs =
      JobsOf(caches, prompts, options, optional_bos, boundaries, constraints,
             streamed);
  const GilReleased no_gil;
  Streams streams = bell == nullptr
                        ? gemma.Start(jobs, &CheckSignals)
                        : gemma.TryStart(jobs, bell->lock_wait(), bell->ring());
  if (streams.empty()) return std::nullopt;
  Call call(std::move(streams), streamed);
  if (bell != nullptr) {
    call.Watch(*bell);
  } else if (!streamed) {
    call.Wait(progress);
  }
  return call;
}

void RegisterResults(py::module_& module) {
  py::class_<GenerateResult>(module, "Result")
      .def_readonly("token_ids", &GenerateResult::token_ids)
      .def_property_readonly(
          "text_bytes",
          [](const GenerateResult& r) { return py::bytes(r.text); })
      .def_property_readonly("logprobs",
                             [](const GenerateResult& r) -> py::object {
                               if (r.logprobs.size() != r.token_ids.size())
                                 return py::none();
                               return ArrayOf(std::vector<float>(r.logprobs),
                                              {r.logprobs.size()});
                             })
      .def_property_readonly("top_logprobs",
                             [](const GenerateResult& r) {
                               return TopArrays(r.top_logprobs,
                                                r.token_ids.size());
                             })
      .def_readonly("seed", &GenerateResult::seed)
      .def_property_readonly(
          "finish_reason",
          [](const GenerateResult& r) { return NameOf(r.finish_reason); })
      .def_readonly("prompt_tokens", &GenerateResult::prompt_tokens)
      .def_readonly("cached_tokens", &GenerateResult::cached_tokens)
      .def_property_readonly(
          "prefix_tokens",
          [](const GenerateResult& r) { return TokensByTier(r.prefix); })
      .def_property_readonly(
          "miss_reason",
          [](const GenerateResult& r) { return NameOf(r.prefix.miss); })
      .def_readonly("drafted", &GenerateResult::drafted)
      .def_readonly("accepted", &GenerateResult::accepted)
      .def_readonly("prefill_s", &GenerateResult::prefill_s)
      .def_readonly("decode_s", &GenerateResult::decode_s);

  py::class_<TokenEvent>(module, "Event")
      .def_readonly("token_id", &TokenEvent::token_id)
      .def_property_readonly("logprob", &LogprobOf)
      .def_property_readonly(
          "top_logprobs",
          [](const TokenEvent& e) { return TopArrays(e.top_logprobs, 0); })
      .def_property_readonly(
          "bytes", [](const TokenEvent& e) { return py::bytes(e.text); })
      .def_property_readonly("finished",
                             [](const TokenEvent& e) {
                               return e.finish_reason != FinishReason::kNone;
                             })
      .def_property_readonly("finish_reason", &FinishReasonOf);

  const auto no_gil = py::call_guard<GilReleased>();
  py::class_<Waker, std::shared_ptr<Waker>>(module, "Waker")
      .def(py::init([] { return std::make_shared<Waker>(); }))
      .def_property_readonly("fd", &Waker::fd)
      .def("take", &Waker::Take);
  py::class_<Bell>(module, "Bell")
      .def(py::init<const std::shared_ptr<Waker>&>(), py::arg("waker"))
      .def_property_readonly("key", &Bell::key)
      .def("ring", [](const Bell& bell) { (*bell.ring())(); });
  py::class_<Call>(module, "Call", py::custom_type_setup(&CollectCalls))
      .def(
          "next",
          [](Call& call, double timeout_s) {
            if (timeout_s <= 0) return call.Next(0);
            const GilReleased released;
            return call.Next(timeout_s);
          },
          py::arg("timeout_s") = 0.0)
      .def("take", &TakeEvents,
           "Returns tuples (bytes, token_id, logprob, finish_reason, "
           "top_logprobs) of all events that are there, without waiting, and "
           "whether no others come. Taking them makes no room for further "
           "tokens before `wake`.")
      .def("cancel", &Call::Cancel, py::arg("read") = Call::kAll)
      .def("abort", &Call::Abort)
      .def_property_readonly("waits_for_reader", &Call::WaitsForReader)
      .def_property_readonly("done", &Call::done)
      .def("prepare_to_wait", &Call::PrepareToWait,
           "Must be called before waiting for the call. Raises an error if "
           "the thread would wait for itself.")
      .def_property_readonly("progress", &Call::progress)
      .def_property_readonly("cached_tokens", &Call::cached_tokens)
      .def_static("wake", &Call::WakeAll, py::arg("calls"),
                  "Continues all of these calls, in steps that they share.")
      .def_property_readonly("prompt_range", &Call::prompt_range)
      .def("watch", &Call::Watch, py::arg("bell"))
      .def("wait", &Call::Wait, py::arg("progress") = py::none(), no_gil,
           "Waits for the end. Calls `progress(tokens, ended)` now and then; "
           "what that raises undoes the call.")
      .def("result", &Call::Result, no_gil)
      .def("results", &Call::Results);
}

// `progress` must outlive the options.
LoadOptions OptionsOf(size_t threads, const Progress& progress,
                      const std::string& packed_folder,
                      const std::string& quantize, bool profile,
                      bool pin_threads) {
  LoadOptions options;
  options.profile = profile;
  options.pin_threads = pin_threads;
  options.quantize = TargetOf(quantize);
  options.threads = threads;
  options.packed_folder = packed_folder;
  options.progress = [&progress](size_t done, size_t total) {
    CheckSignals();
    if (progress) WithGil([&] { CallPython(*progress, done, total); });
  };
  return options;
}

template <size_t Engine::Stats::*kStat>
size_t StatOf(const Engine& gemma) {
  return gemma.stats().*kStat;
}

py::dict ProfileOf(const Engine& gemma) {
  const StepProfile profile = gemma.profile();
  py::dict phases;
  for (size_t p = 0; p < kStepPhases; ++p) {
    const PhaseProfile& phase = profile.phases[p];
    py::dict parts;
    for (size_t i = 0; i < kStepParts; ++i) {
      parts[py::str(std::string(kStepPartNames[i]))] =
          py::make_tuple(phase.part_s[i], phase.serial_s[i]);
    }
    phases[py::str(std::string(kStepPhaseNames[p]))] = py::make_tuple(
        phase.steps, phase.rows, phase.loops, phase.seconds, parts);
  }
  return phases;
}

using PlaceTuple = std::tuple<std::string, size_t, uint64_t, std::string,
                              size_t, size_t, std::string, size_t>;

TensorType FloatTypeOf(const std::string& name) {
  for (const TensorTypeInfo& info : kTensorTypes) {
    if (info.name == name) return info.type;
  }
  throw InvalidArgument(StrCat("type ", name, ", expected F32, F16 or BF16"));
}

constexpr const char* kFormNames[] = {"as stored", "plus one", "integers",
                                      "blocks transposed"};

std::vector<TensorPlace> PlacesOf(const std::vector<PlaceTuple>& tuples) {
  std::vector<TensorPlace> places;
  for (const auto& [name, file, offset, type, rows, cols, form, blocks] :
       tuples) {
    places.push_back({name, file, offset, FloatTypeOf(type), rows, cols,
                      EnumFromName<TensorForm>(kFormNames, "form", form),
                      blocks});
  }
  return places;
}

}  // namespace

void RegisterGemma(py::module_& module) {
  RegisterResults(module);

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def_static(
          "load_gguf",
          [](const std::string& path, size_t threads, const Progress& progress,
             const std::string& packed_folder, const std::string& quantize,
             bool profile, bool pin_threads) {
            const LoadOptions options =
                OptionsOf(threads, progress, packed_folder, quantize, profile,
                          pin_threads);
            const GilReleased no_gil;
            return LetEndAnywhere(Engine::Load(path, options));
          },
          py::arg("path"), py::arg("threads") = 0,
          py::arg("progress") = py::none(), py::arg("packed_folder") = "",
          py::arg("quantize") = "", py::arg("profile") = false,
          py::arg("pin_threads") = false)
      .def_static(
          "load_files",
          [](const ModelConfig& config, const std::string& description,
             const std::vector<std::string>& paths,
             const std::vector<PlaceTuple>& places, size_t threads,
             const Progress& progress, const std::string& packed_folder,
             const std::string& quantize, bool profile, bool pin_threads) {
            const LoadOptions options =
                OptionsOf(threads, progress, packed_folder, quantize, profile,
                          pin_threads);
            const GilReleased no_gil;
            TensorFiles files(description, paths, PlacesOf(places));
            return LetEndAnywhere(Engine::FromTensors(config, files, options));
          },
          py::arg("config"), py::arg("description"), py::arg("paths"),
          py::arg("places"), py::arg("threads") = 0,
          py::arg("progress") = py::none(), py::arg("packed_folder") = "",
          py::arg("quantize") = "", py::arg("profile") = false,
          py::arg("pin_threads") = false,
          "Loads weights at known places in files: (name, file, offset, type, "
          "rows, columns, form, blocks), see io/tensor_files.h.")
      .def_static(
          "from_tensors",
          [](const ModelConfig& config, py::object source, size_t threads,
             const std::string& quantize, bool profile, bool pin_threads) {
            NumpySource tensors(std::move(source));
            LoadOptions options;
            options.threads = threads;
            options.quantize = TargetOf(quantize);
            options.profile = profile;
            options.pin_threads = pin_threads;
            return LetEndAnywhere(
                Engine::FromTensors(config, tensors, options));
          },
          py::arg("config"), py::arg("source"), py::arg("threads") = 0,
          py::arg("quantize") = "", py::arg("profile") = false,
          py::arg("pin_threads") = false)
      .def_property_readonly("config",
                             [](const Engine& gemma) { return gemma.config(); })
      .def_property_readonly(
          "fingerprint",
          [](const Engine& gemma) { return gemma.fingerprint().Hex(); })
      .def_property_readonly(
          "weights_fingerprint",
          [](const Engine& gemma) { return gemma.weights_fingerprint().Hex(); })
      .def_property_readonly("threads", &Engine::num_threads)
      .def_property_readonly(
          "placement",
          [](const Engine& gemma) {
            const ThreadPlacement placement = gemma.placement();
            std::vector<std::tuple<int, int, int>> processors;
            for (const Processor& p : placement.processors) {
              processors.emplace_back(p.id, p.core, p.node);
            }
            return py::make_tuple(placement.pinned,
                                  std::move(processors));
          },
          "(whether pinned, processors as `placement_order` has them).")
      .def_property_readonly(
          "packed_report",
          [](const Engine& gemma) {
            const PackedReport& report = gemma.packed_report();
            return py::make_tuple(NameOf(report.state), FsDecode(report.path),
                                  FsDecode(report.reason));
          },
          "(state, path, reason) of the packed weights.")
      .def(
          "matrices",
          [](const Engine& gemma) {
            std::vector<
                std::tuple<std::string, std::string, size_t, size_t, size_t>>
                matrices;
            for (const MatrixInfo& m : gemma.matrices()) {
              matrices.emplace_back(m.name, Info(m.type).name, m.rows, m.cols,
                                    m.rows * RowBytes(m.type, m.cols));
            }
            return matrices;
          },
          "Returns (name, type, rows, columns, bytes) of each matrix, as it is "
          "kept.")
      .def_property_readonly("steps", StatOf<&Engine::Stats::steps>)
      .def_property_readonly("parallel_loops",
                             StatOf<&Engine::Stats::parallel_loops>)
      .def_property_readonly("preemptions", StatOf<&Engine::Stats::preemptions>)
      .def_property_readonly("looks", StatOf<&Engine::Stats::looks>)
      .def("check_ahead", &Engine::CheckAhead, py::arg("seconds"),
           py::call_guard<GilReleased>())
      .def_property_readonly("profiled", &Engine::profiled)
      .def("profile", &ProfileOf,
           "Returns (steps, rows, loops, seconds, {part: (seconds, serial "
           "seconds)}) by phase.")
      .def_property_readonly("draft_rows", StatOf<&Engine::Stats::draft_rows>)
      .def(
          "with_draft",
          [](const Engine& gemma, const std::shared_ptr<Engine>& draft) {
            return LetEndAnywhere(gemma.WithDraft(draft));
          },
          py::arg("draft"),
          "Returns the same model, whose requests may ask the draft; with None "
          "there is no draft.")
      .def("check_fits", &Engine::CheckFits, py::arg("cache"),
           "Raises the error that a request with this conversation would.")
      .def(
          "set_token_bytes",
          [](Engine& gemma, const std::vector<py::bytes>& token_bytes) {
            const std::vector<std::string_view> views(token_bytes.begin(),
                                                      token_bytes.end());
            gemma.set_token_text(std::make_shared<TokenText>(views));
          },
          py::arg("token_bytes"))
      .def("start", &Start, py::arg("caches"), py::arg("prompts"),
           py::arg("options"), py::arg("streamed"),
           py::arg("bell") = py::none(),
           py::arg("optional_bos") = std::vector<bool>(),
           py::arg("boundaries") = std::vector<std::vector<size_t>>(),
           py::arg("constraints") = std::vector<py::object>(),
           py::arg("progress") = py::none(),
           "Starts a call. With a bell it does not wait, and returns None if a "
           "cache is in use. Without a bell, a call that is not streamed has "
           "ended when this returns, and `progress(tokens, ended)` is called "
           "now and then; what that raises undoes the call.")
      .def_property_readonly(
          "embedding_dims",
          [](const Engine& gemma) { return EmbeddingDims(gemma.config()); })
      .def("draft_logits", &DraftLogits, py::arg("tokens"), py::arg("guesses"),
           "Returns the drafter's logits after the tokens, [guesses, "
           "vocab_size]. Each guess is the likeliest token of the one before.")
      .def("embed", &Embed, py::arg("texts"), py::arg("dim"),
           py::arg("pooling"), py::arg("progress") = py::none(),
           "Returns vectors [len(texts), dim], or the whole ones for 0. Calls "
           "`progress()` now and then; what that raises ends the call.")
      .def("logits", &Logits, py::arg("cache"), py::arg("tokens"),
           py::arg("all_positions"), py::arg("progress") = py::none(),
           "Appends tokens and returns the logits after the last, or after "
           "each. Calls `progress()` now and then; what that raises ends the "
           "call, which then leaves the cache as it was.");
}

}  // namespace gkv
