// Plan v1 (docs/formats/plan.md): which host fetches which bytes by when, and how much it reserves.
//
// Reads and refuses plans like the Python side (thaw/wire.py, invoker/containers/plans.py), in the same order: unknown
// fields are ignored, the error for a missing field names its path, and then the plan must not contradict itself.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "thaw/json.h"

namespace thaw {

constexpr int64_t kPlanVersion = 1;

struct FileRange {
    std::string file;
    int64_t offset = 0, n_bytes = 0;
};

struct PlanStage {
    int64_t stage = 0;
    std::string host, device, role;
    int64_t first_layer = 0, end_layer = 0;
    std::vector<FileRange> first_ranges, later_ranges;
    int64_t reserve_bytes = 0;
    double share = 1.0;
    std::optional<int64_t> fetch_deadline_ms, pace_bytes_per_s;
};

struct PlanModel {
    std::string uri, sha256, etag;
    int64_t n_bytes = 0;
};

struct PlanTransport {
    std::string kind = "none", address, credential_ref;
};

// One term of the bound or of the prediction (thaw/bound.py).
struct PlanTerm {
    std::string part, source;
    std::optional<double> seconds;
    int64_t stage = 0;
    std::string host;
    int64_t n_starts = 0, n_bytes = 0, prompt_tokens = 0;
};

struct Plan {
    int64_t version = 0;
    std::string plan_id, group_id;
    int64_t epoch = 0;
    std::string action, action_version;
    std::vector<PlanStage> stages;
    std::optional<PlanModel> model;
    PlanTransport transport;
    int64_t keep = 1, created_wall_ns = 0;
    std::optional<double> predicted_ttft_s, bound_ttft_s;
    std::vector<PlanTerm> predicted_terms, bound_terms;
};

namespace plan_detail {

using Kind = Json::Kind;

[[noreturn]] inline void refuse(const std::string &why) { throw Fault(THAW_BAD_ARGUMENT, why); }

inline void expect(bool ok, const char *what, const std::string &path) {
    if (!ok) refuse(path + ": expected " + what);
}

inline bool fits(const Json &j) {  // Python's integers have no limit, but ours do
    return j.kind == Kind::kInteger && (j.integer != INT64_MAX || j.natural == uint64_t(INT64_MAX));
}

inline void read(const Json &j, const std::string &path, int64_t *to) {
    expect(fits(j), "int", path);
    *to = j.integer;
}
inline void read(const Json &j, const std::string &path, double *to) {
    expect(j.kind == Kind::kInteger || j.kind == Kind::kReal, "float", path);
    *to = j.real;
}
inline void read(const Json &j, const std::string &path, std::string *to) {
    expect(j.kind == Kind::kString, "str", path);
    *to = j.text;
}

void read(const Json &j, const std::string &path, FileRange *to);
void read(const Json &j, const std::string &path, PlanStage *to);
void read(const Json &j, const std::string &path, PlanModel *to);
void read(const Json &j, const std::string &path, PlanTransport *to);
void read(const Json &j, const std::string &path, PlanTerm *to);

template <typename T>
void read(const Json &j, const std::string &path, std::optional<T> *to) {
    if (j.kind == Kind::kNull) return;
    read(j, path, &to->emplace());
}

template <typename T>
void read(const Json &j, const std::string &path, std::vector<T> *to) {
    expect(j.kind == Kind::kArray, "an array", path);
    for (size_t i = 0; i < j.items.size(); i++) read(j.items[i], path + format("[%zu]", i), &to->emplace_back());
}

// The fields of an object, by name.
class Fields {
   public:
    Fields(const Json &object, std::string path, const char *type)
        : object_(object), path_(std::move(path)), type_(type) {
        expect(object.kind == Kind::kObject, "an object", path_);
    }
    template <typename T>
    Fields &must(const char *name, T *to) {
        if (object_.find(name) == nullptr) refuse(path_ + "." + name + ": missing in " + type_);
        return may(name, to);
    }
    template <typename T>
    Fields &may(const char *name, T *to) {
        if (const Json *value = object_.find(name)) read(*value, path_ + "." + name, to);
        return *this;
    }
    Fields &one_of(const char *name, const char *type, std::initializer_list<const char *> values, std::string *to) {
        const Json *value = object_.find(name);
        if (value == nullptr) return *this;
        for (const char *v : values)
            if (value->kind == Kind::kString && value->text == v) *to = v;
        if (value->kind != Kind::kString || *to != value->text)
            refuse(path_ + "." + name + ": '" + value->text + "' is not a " + type);
        return *this;
    }

   private:
    const Json &object_;
    const std::string path_;
    const char *const type_;
};

struct Layers {
    int64_t *first, *end;
};

inline void read(const Json &j, const std::string &path, Layers *to) {
    expect(j.kind == Kind::kArray, "an array", path);
    expect(j.items.size() == 2, "2 items", path);
    read(j.items[0], path + "[0]", to->first);
    read(j.items[1], path + "[1]", to->end);
}

inline void read(const Json &j, const std::string &path, FileRange *to) {
    Fields(j, path, "FileRange").must("file", &to->file).must("offset", &to->offset).must("n_bytes", &to->n_bytes);
}

inline void read(const Json &j, const std::string &path, PlanStage *to) {
    Layers layers{&to->first_layer, &to->end_layer};
    Fields fields(j, path, "PlanStage");
    fields.must("stage", &to->stage).must("host", &to->host).must("device", &to->device);
    if (j.find("role") == nullptr) refuse(path + ".role: missing in PlanStage");
    fields.one_of("role", "StageRole", {"full", "low"}, &to->role);
    fields.must("layers", &layers).must("first_ranges", &to->first_ranges).may("later_ranges", &to->later_ranges);
    fields.may("reserve_bytes", &to->reserve_bytes).may("share", &to->share);
    fields.may("fetch_deadline_ms", &to->fetch_deadline_ms).may("pace_bytes_per_s", &to->pace_bytes_per_s);
}

inline void read(const Json &j, const std::string &path, PlanModel *to) {
    Fields fields(j, path, "PlanModel");
    fields.must("uri", &to->uri).must("sha256", &to->sha256).must("etag", &to->etag).must("n_bytes", &to->n_bytes);
}

inline void read(const Json &j, const std::string &path, PlanTransport *to) {
    Fields fields(j, path, "PlanTransport");
    fields.one_of("kind", "TransportKind", {"none", "redis", "object", "tcp"}, &to->kind);
    fields.may("address", &to->address).may("credential_ref", &to->credential_ref);
}

inline void read(const Json &j, const std::string &path, PlanTerm *to) {
    Fields fields(j, path, "Term");
    fields.must("part", &to->part).must("seconds", &to->seconds).must("source", &to->source);
    fields.may("stage", &to->stage).may("host", &to->host).may("n_starts", &to->n_starts);
    fields.may("n_bytes", &to->n_bytes).may("prompt_tokens", &to->prompt_tokens);
}

inline void read(const Json &j, const std::string &path, Plan *to) {
    Fields fields(j, path, "Plan");
    fields.must("version", &to->version).must("plan_id", &to->plan_id).must("group_id", &to->group_id);
    fields.must("epoch", &to->epoch).must("action", &to->action).must("action_version", &to->action_version);
    fields.must("stages", &to->stages).may("model", &to->model).may("transport", &to->transport);
    fields.may("keep", &to->keep).may("created_wall_ns", &to->created_wall_ns);
    fields.may("predicted_ttft_s", &to->predicted_ttft_s).may("bound_ttft_s", &to->bound_ttft_s);
    fields.may("predicted_terms", &to->predicted_terms).may("bound_terms", &to->bound_terms);
}

inline void check_stage(const PlanStage &s) {
    const auto stage = (long long)s.stage;
    if (s.first_layer < 0 || s.end_layer < s.first_layer)
        refuse(format("stage %lld has layers [%lld, %lld)", stage, (long long)s.first_layer, (long long)s.end_layer));
    if (!(s.share > 0.0 && s.share <= 1.0)) refuse(format("stage %lld has a share of ", stage) + written(s.share));
    if (s.reserve_bytes < 0) refuse(format("stage %lld reserves %lld bytes", stage, (long long)s.reserve_bytes));
    for (const auto *ranges : {&s.first_ranges, &s.later_ranges})
        for (const FileRange &r : *ranges)
            if (r.offset < 0 || r.n_bytes <= 0)
                refuse(format("stage %lld wants %lld bytes of ", stage, (long long)r.n_bytes) + r.file +
                       format(" from %lld", (long long)r.offset));
}

// In a plan of several stages, each stage must have something to compute and a transport to the others.
inline void check_group(const Plan &plan) {
    if (!plan.model) refuse("an ordinary function has one stage");
    for (const PlanStage &s : plan.stages) {
        if (s.first_layer == s.end_layer) refuse(format("stage %lld has no layer", (long long)s.stage));
        if (!s.later_ranges.empty() && s.role != "full")
            refuse(format("stage %lld fetches more than its layers and reserves no memory for it", (long long)s.stage));
    }
    if (plan.transport.kind == "none" || plan.transport.address.empty() || plan.transport.credential_ref.empty())
        refuse(format("%zu stages have no way to reach one another", plan.stages.size()));
}

}  // namespace plan_detail

// Throws Fault for another version or a plan that contradicts itself.
inline void check_plan(const Plan &plan) {
    using plan_detail::refuse;
    if (plan.version != kPlanVersion)
        refuse(format("plan version %lld; this host reads %lld", (long long)plan.version, (long long)kPlanVersion));
    if (plan.group_id.size() != 32 || plan.group_id.find_first_not_of("0123456789abcdef") != std::string::npos)
        refuse("group id '" + plan.group_id + "' is not 32 hex digits");
    bool numbered = !plan.stages.empty();
    for (size_t i = 0; i < plan.stages.size(); i++) numbered = numbered && plan.stages[i].stage == int64_t(i);
    if (!numbered) refuse("the stages of a plan are numbered from 0 without a gap");
    for (const PlanStage &stage : plan.stages) plan_detail::check_stage(stage);
    int64_t end = 0;
    for (const PlanStage &stage : plan.stages) {
        if (stage.first_layer != end) refuse("the layers of a plan's stages do not join");
        end = stage.end_layer;
    }
    const auto n_stages = int64_t(plan.stages.size());
    if (plan.keep < 1 || plan.keep > n_stages)
        refuse(format("keep is %lld of %lld stages", (long long)plan.keep, (long long)n_stages));
    if (n_stages > 1) plan_detail::check_group(plan);
}

inline Plan read_plan(const Json &json) {
    Plan plan;
    plan_detail::read(json, "$", &plan);
    check_plan(plan);
    return plan;
}

namespace plan_detail {

inline std::string write(const std::vector<FileRange> &ranges) {
    std::string s = "[";
    for (const FileRange &r : ranges)
        s += (s.size() > 1 ? "," : "") + ("{\"file\":" + quoted(r.file)) +
             format(",\"offset\":%lld,\"n_bytes\":%lld}", (long long)r.offset, (long long)r.n_bytes);
    return s + "]";
}

inline std::string write(const std::optional<int64_t> &v) { return v ? format("%lld", (long long)*v) : "null"; }
inline std::string write(const std::optional<double> &v) { return v ? written(*v) : "null"; }

inline std::string write(const std::vector<PlanTerm> &terms) {
    std::string s = "[";
    for (const PlanTerm &t : terms)
        s += (s.size() > 1 ? "," : "") + ("{\"part\":" + quoted(t.part)) + ",\"seconds\":" + write(t.seconds) +
             ",\"source\":" + quoted(t.source) + format(",\"stage\":%lld,\"host\":", (long long)t.stage) +
             quoted(t.host) + format(",\"n_starts\":%lld,\"n_bytes\":%lld,\"prompt_tokens\":%lld}",
                                     (long long)t.n_starts, (long long)t.n_bytes, (long long)t.prompt_tokens);
    return s + "]";
}

inline std::string write(const PlanStage &s) {
    return format("{\"stage\":%lld,\"host\":", (long long)s.stage) + quoted(s.host) + ",\"device\":" +
           quoted(s.device) + ",\"role\":" + quoted(s.role) +
           format(",\"layers\":[%lld,%lld],\"first_ranges\":", (long long)s.first_layer, (long long)s.end_layer) +
           write(s.first_ranges) + ",\"later_ranges\":" + write(s.later_ranges) +
           format(",\"reserve_bytes\":%lld,\"share\":", (long long)s.reserve_bytes) + written(s.share) +
           ",\"fetch_deadline_ms\":" + write(s.fetch_deadline_ms) + ",\"pace_bytes_per_s\":" +
           write(s.pace_bytes_per_s) + "}";
}

}  // namespace plan_detail

// Writes every field, in the order of the format's page.
inline std::string write_plan(const Plan &p) {
    std::string stages;
    for (const PlanStage &s : p.stages) stages += (stages.empty() ? "" : ",") + plan_detail::write(s);
    std::string model = "null";
    if (p.model)
        model = "{\"uri\":" + quoted(p.model->uri) + ",\"sha256\":" + quoted(p.model->sha256) + ",\"etag\":" +
                quoted(p.model->etag) + format(",\"n_bytes\":%lld}", (long long)p.model->n_bytes);
    return format("{\"version\":%lld,\"plan_id\":", (long long)p.version) + quoted(p.plan_id) + ",\"group_id\":" +
           quoted(p.group_id) + format(",\"epoch\":%lld,\"action\":", (long long)p.epoch) + quoted(p.action) +
           ",\"action_version\":" + quoted(p.action_version) + ",\"stages\":[" + stages + "],\"model\":" + model +
           ",\"transport\":{\"kind\":" + quoted(p.transport.kind) + ",\"address\":" + quoted(p.transport.address) +
           ",\"credential_ref\":" + quoted(p.transport.credential_ref) +
           format("},\"keep\":%lld,\"created_wall_ns\":%lld", (long long)p.keep, (long long)p.created_wall_ns) +
           ",\"predicted_ttft_s\":" + plan_detail::write(p.predicted_ttft_s) + ",\"bound_ttft_s\":" +
           plan_detail::write(p.bound_ttft_s) + ",\"predicted_terms\":" + plan_detail::write(p.predicted_terms) +
           ",\"bound_terms\":" + plan_detail::write(p.bound_terms) + "}";
}

}  // namespace thaw
