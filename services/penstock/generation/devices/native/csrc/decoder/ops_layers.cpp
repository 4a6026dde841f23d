// The parts of a decoder from tensors and sizes by name: see decoder.h.
#include <string>
#include <vector>

#include "decoder/decoder.h"

namespace penstock {

// A layer's tensors and numbers by name.
struct NamedParts {
  const std::string& owner;
  Named<at::Tensor>& tensors;
  Named<int64_t>& sizes;

  Format format(const std::string& name) const {
    const int64_t format = sizes.take(name + ".format");
    TORCH_CHECK(format >= 0 && format <= int(LAST_FORMAT), owner, " has no such ", name);
    return Format(format);
  }
  // In a quantised checkpoint some matrices may have another format than the rest.
  Linear linear(const std::string& name, int64_t inputs, int64_t width, Gate gate) const {
    return Linear(tensors, name, format(name), inputs, width, gate);
  }
  Mlp mlp(const std::string& prefix, const ModelSizes& model, int64_t inner) const {
    return {linear(prefix + "gated", model.hidden, inner, model.gate),
            linear(prefix + "down", inner, model.hidden, Gate::NONE)};
  }
};

static LatentLayer latent_of(const NamedParts& from, const ModelSizes& model, int64_t rank) {
  const LatentSizes sizes{
      .heads = model.num_heads,
      .rank = rank,
      .plain_dim = from.sizes.take("plain_dim"),
      .turned_dim = from.sizes.take("turned_dim"),
      .value_dim = from.sizes.take("value_dim"),
      .query_rank = from.sizes.take("query_rank"),
  };
  std::optional<LatentQueries> queries;
  if (sizes.query_rank > 0)
    queries.emplace(LatentQueries{
        from.tensors.take("query_norm"),
        from.linear("query_up", sizes.query_rank, sizes.queries(), Gate::NONE),
    });
  return {
      .sizes = sizes,
      .row = from.linear("row", model.hidden, sizes.row_dim(), Gate::NONE),
      .queries = queries,
      .norm = from.tensors.take("latent_norm"),
      .keys = from.tensors.take("head_keys"),
      .values = from.tensors.take("head_values"),
      .format = from.format("heads"),
  };
}

static Mixture mixture_of(const NamedParts& from, const ModelSizes& model, const Factors& factors,
                          int64_t count, int64_t inner) {
  const ChoiceRule rule{
      .per_row = from.sizes.take("per_row"),
      .groups = from.sizes.take("groups"),
      .groups_of_row = from.sizes.take("groups_of_row"),
      .ranked_by = from.sizes.take("ranked_by"),
      .is_sigmoid = from.sizes.take("is_sigmoid") != 0,
      .sums_to_one = from.sizes.take("sums_to_one") != 0,
      .least = factors.choice_least,
      .scale = factors.choice_scale,
  };
  const Format format = from.format("experts");
  std::vector<Mlp> experts;
  for (int64_t e = 0; e < count; ++e) {
    const std::string prefix = "expert." + std::to_string(e) + ".";
    experts.push_back({
        Linear(from.tensors, prefix + "gated", format, model.hidden, inner, model.gate),
        Linear(from.tensors, prefix + "down", format, inner, model.hidden, Gate::NONE),
    });
  }
  std::optional<Mlp> shared;
  std::optional<Linear> gate;
  if (const auto width = from.sizes.find("shared_inner")) {
    shared.emplace(from.mlp("shared.", model, *width));
    if (from.sizes.find("shared_is_gated"))
      gate.emplace(from.linear("shared.gate", model.hidden, 1, Gate::NONE));
  }
  return {
      .rule = rule,
      .bias = from.tensors.find("choice_bias"),
      .router = from.linear("router", model.hidden, count, Gate::NONE),
      .experts = experts,
      .format = format,
      .inner = inner,
      .shared = shared,
      .gate = gate,
  };
}

Layer layer_of(const Tensors& tensors, const Sizes& sizes, const ModelSizes& model,
               const Factors& factors, int64_t number) {
  const std::string owner = "layer " + std::to_string(number) + " of the decoder";
  Named<at::Tensor> from(owner, tensors);
  Named<int64_t> own(owner, sizes);
  const NamedParts parts_of{owner, from, own};
  const auto linear = [&](const char* name, int64_t inputs, int64_t width, Gate gate) {
    return parts_of.linear(name, inputs, width, gate);
  };
  const int64_t kv_heads = own.find("num_kv_heads").value_or(model.num_kv_heads),
                head_dim = own.find("head_dim").value_or(model.head_dim),
                inner = own.find("inner").value_or(model.inner),
                parts = own.find("parts").value_or(3);
  const bool has_gates = own.find("has_gates").value_or(0) != 0;
  TORCH_CHECK(kv_heads > 0 && model.num_heads % kv_heads == 0 && head_dim > 0 &&
                  head_dim <= MAX_HEAD_DIM && parts >= 1 && parts <= 3,
              owner, " has no such heads");
  std::optional<TokenGate> token_gate;
  if (const auto dim = own.find("token_dim"))
    token_gate.emplace(TokenGate{
        linear("token_gate", model.hidden, *dim, Gate::NONE),
        linear("token_out", *dim, model.hidden, Gate::NONE),
        from.take("token_norm"),
    });
  std::optional<DeltaLayer> delta;
  if (const auto place = own.find("state_place")) {
    const at::Tensor conv = from.take("conv");
    const DeltaSizes sizes{
        .key_heads = own.take("key_heads"),
        .value_heads = own.take("value_heads"),
        .key_dim = own.take("key_dim"),
        .value_dim = own.take("value_dim"),
        .kernel = conv.size(0),
    };
    delta.emplace(DeltaLayer{
        .sizes = sizes,
        .place = *place,
        .numbers = linear("numbers", model.hidden, 2 * sizes.value_heads, Gate::NONE),
        .conv = conv,
        .decay = from.take("decay"),
        .bias = from.take("decay_bias"),
        .norm = from.take("state_norm"),
    });
  }
  std::optional<LatentLayer> latent;
  if (const auto rank = own.find("rank")) latent.emplace(latent_of(parts_of, model, *rank));
  std::optional<Mlp> mlp;
  std::optional<Mixture> mixture;
  if (const auto experts = own.find("experts"))
    mixture.emplace(mixture_of(parts_of, model, factors, *experts, inner));
  else
    mlp.emplace(parts_of.mlp("", model, inner));
  // Of the results of attention, or of what is in its place.
  const int64_t heads = delta    ? delta->sizes.values()
                        : latent ? latent->sizes.values()
                                 : model.num_heads * head_dim;
  const int64_t outputs = delta ? delta->sizes.outputs()
                          : latent
                              ? latent->sizes.first_outputs()
                              : heads * (has_gates ? 2 : 1) + (parts - 1) * kv_heads * head_dim;
  const std::optional<at::Tensor> factor = from.find("factor");
  const Layer layer{
      .input_norm = from.find("input_norm"),
      .attention_out_norm = from.find("attention_out_norm"),
      .post_attention_norm = from.find("post_attention_norm"),
      .mlp_out_norm = from.find("mlp_out_norm"),
      .q_norm = from.find("q_norm"),
      .k_norm = from.find("k_norm"),
      .sinks = from.find("sinks"),
      .qkv = linear("qkv", model.first_inputs(), outputs, Gate::NONE),
      .output = linear("output", heads, model.hidden, Gate::NONE),
      .mlp = mlp,
      .mixture = mixture,
      .token_gate = token_gate,
      .delta = delta,
      .latent = latent,
      .num_kv_heads = kv_heads,
      .head_dim = head_dim,
      .window = delta ? 0 : own.take("window"),
      .turn = delta ? 0 : own.take("turn"),
      .keys = own.find("keys").value_or(number),
      .parts = int(parts),
      .norms_values = own.find("norms_values").value_or(0) != 0,
      .has_gates = has_gates,
      .factor = factor ? factor->item<float>() : 1.0f,
  };
  from.check_all_taken();
  own.check_all_taken();
  for (const auto* norm : {&layer.input_norm, &layer.attention_out_norm, &layer.post_attention_norm,
                           &layer.mlp_out_norm, &layer.last_norm()})
    TORCH_CHECK(!*norm || ((*norm)->numel() == model.hidden && (*norm)->is_contiguous()),
                "a norm has the wrong size");
  for (const auto* norm : {&layer.q_norm, &layer.k_norm})
    TORCH_CHECK(!*norm || ((*norm)->numel() == head_dim && (*norm)->is_contiguous()),
                "a norm of the heads has the wrong size");
  TORCH_CHECK(!layer.sinks || (layer.sinks->numel() == model.num_heads &&
                               layer.sinks->scalar_type() == at::kFloat),
              "the sinks have the wrong size");
  return layer;
}

ModelSizes sizes_of(const Sizes& sizes) {
  Named<int64_t> from("the decoder", sizes);
  ModelSizes model{
      .gate = Gate(from.take("gate")),
      .hidden = from.take("hidden"),
      .inner = from.take("inner"),
      .num_heads = from.take("num_heads"),
      .num_kv_heads = from.take("num_kv_heads"),
      .head_dim = from.take("head_dim"),
      .head_format = Format(from.take("head_format")),
      .vocab = from.take("vocab"),
      .token_format = std::nullopt,
      .joint = Joint(from.find("joint").value_or(0)),
  };
  if (const auto format = from.find("token_format")) {
    TORCH_CHECK(*format >= 0 && *format <= int(LAST_FORMAT), "no such product of tokens' vectors");
    model.token_format = Format(*format);
  }
  from.check_all_taken();
  return model;
}

Factors factors_of(const c10::Dict<std::string, double>& factors) {
  Named<double> from("the decoder", factors);
  const Factors found{
      .eps = float(from.take("eps")),
      .attention_scale = float(from.take("attention_scale")),
      .softcap = float(from.take("softcap")),
      .embedding_scale = float(from.take("embedding_scale")),
      .residual_scale = float(from.take("residual_scale")),
      .token_product = float(from.find("token_product").value_or(1.0)),
      .token_row = float(from.find("token_row").value_or(1.0)),
      .token_sum = float(from.find("token_sum").value_or(1.0)),
      .latent_eps = float(from.find("latent_eps").value_or(0.0)),
      .choice_least = float(from.find("choice_least").value_or(0.0)),
      .choice_scale = float(from.find("choice_scale").value_or(1.0)),
  };
  from.check_all_taken();
  return found;
}

}  // namespace penstock
