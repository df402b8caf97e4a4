"""Right answers: names and shapes as in transformers, fused projections, torch's own kernel."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x, weight, eps=1e-6):
    input_dtype = x.dtype
    hidden_states = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return weight * hidden_states.to(input_dtype)


def layer_norm(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def causal_mask(T, S, window=None):
    mask = torch.ones(T, S, dtype=torch.bool).tril(diagonal=S - T)
    if window is not None:
        mask = mask.triu(diagonal=S - T - window + 1)
    return mask


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate(x, positions, base=10000.0):
    dim = x.shape[-1]
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    freqs = positions.float()[:, None] * inv_freq[None, :]
    emb = torch.cat((freqs, freqs), dim=-1)
    cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
    return (x * cos) + (rotate_half(x) * sin)


def attention(q, k, v, mask=None):
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    dead = ~mask.any(dim=-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | dead, enable_gqa=True)
    return out.masked_fill(dead, 0.0)


def online_softmax(q, k, v, block):
    scale = 1.0 / math.sqrt(q.shape[-1])
    running_max = torch.full((q.shape[0], 1), float("-inf"), dtype=q.dtype, device=q.device)
    running_sum = torch.zeros_like(running_max)
    acc = torch.zeros(q.shape[0], v.shape[-1], dtype=q.dtype, device=q.device)
    for start in range(0, k.shape[0], block):
        scores = (q @ k[start : start + block].T) * scale
        new_max = torch.maximum(running_max, scores.amax(dim=-1, keepdim=True))
        correction = torch.exp(running_max - new_max)
        p = torch.exp(scores - new_max)
        running_sum = running_sum * correction + p.sum(dim=-1, keepdim=True)
        acc = acc * correction + p @ v[start : start + block]
        running_max = new_max
    return acc / running_sum


def swiglu(x, w_gate, w_up, w_down):
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class SelfAttention(nn.Module):
    def __init__(self, d_model, n_q_heads, n_kv_heads):
        super().__init__()
        self.num_heads = n_q_heads
        self.num_key_value_heads = n_kv_heads
        self.head_dim = d_model // n_q_heads
        self.o_proj = nn.Linear(n_q_heads * self.head_dim, d_model, bias=False)
        self.qkv_proj = nn.Linear(d_model, (n_q_heads + 2 * n_kv_heads) * self.head_dim, bias=False)

    def forward(self, x, cache=None):
        bsz, q_len, _ = x.size()
        query_pos = self.num_heads * self.head_dim
        kv_pos = self.num_key_value_heads * self.head_dim
        query, key, value = self.qkv_proj(x).split([query_pos, kv_pos, kv_pos], dim=-1)
        query = query.view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        key = key.view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        value = value.view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        past = 0 if cache is None else cache[0].shape[-2]
        position_ids = torch.arange(past, past + q_len)
        query, key = rotate(query, position_ids), rotate(key, position_ids)
        if cache is not None:
            key = torch.cat([cache[0], key], dim=-2)
            value = torch.cat([cache[1], value], dim=-2)
        attn_output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=causal_mask(q_len, past + q_len), enable_gqa=True
        )
        attn_output = attn_output.transpose(1, 2).reshape(bsz, q_len, -1)
        return self.o_proj(attn_output), (key, value)


class BertSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def transpose_for_scores(self, x):
        return x.unflatten(-1, (self.num_attention_heads, -1)).permute(0, 2, 1, 3)

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None):
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        context = F.scaled_dot_product_attention(
            self.transpose_for_scores(self.query(hidden_states)),
            self.transpose_for_scores(self.key(source)),
            self.transpose_for_scores(self.value(source)),
            attn_mask=attention_mask,
        )
        return self.dense(context.permute(0, 2, 1, 3).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attention = BertSelfAttention(d_model, n_heads)
        self.attention_layernorm = nn.LayerNorm(d_model)
        self.intermediate = nn.Linear(d_model, d_ff)
        self.output = nn.Linear(d_ff, d_model)
        self.output_layernorm = nn.LayerNorm(d_model)

    def forward(self, x, key_padding_mask=None):
        mask = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
        x = self.attention_layernorm(x + self.attention(x, attention_mask=mask))
        return self.output_layernorm(x + self.output(F.relu(self.intermediate(x))))


class CrossDecoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.self_attn = BertSelfAttention(d_model, n_heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.encoder_attn = BertSelfAttention(d_model, n_heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, d_ff)
        self.fc2 = nn.Linear(d_ff, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)

    def forward(self, x, memory):
        mask = causal_mask(x.shape[1], x.shape[1])
        x = self.self_attn_layer_norm(x + self.self_attn(x, attention_mask=mask))
        x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory))
        return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x))))


class GPT2Block(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.n_heads = n_heads
        self.ln_1 = nn.LayerNorm(d_model)
        self.c_attn = nn.Linear(d_model, 3 * d_model)
        self.c_proj = nn.Linear(d_model, d_model)
        self.ln_2 = nn.LayerNorm(d_model)
        self.c_fc = nn.Linear(d_model, d_ff)
        self.mlp_c_proj = nn.Linear(d_ff, d_model)

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(-2))
        return x + self.mlp_c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * F.silu(gate))


class ModernBlock(nn.Module):
    def __init__(self, d_model, n_q_heads, n_kv_heads, d_ff):
        super().__init__()
        self.self_attn = SelfAttention(d_model, n_q_heads, n_kv_heads)
        self.mlp = LlamaMLP(d_model, d_ff)
        self.input_layernorm = LlamaRMSNorm(d_model)
        self.post_attention_layernorm = LlamaRMSNorm(d_model)

    def forward(self, x, cache=None):
        residual = x
        hidden_states, cache = self.self_attn(self.input_layernorm(x), cache)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
        return residual + hidden_states, cache


class ParallelBlock(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.ln_1 = nn.LayerNorm(d_model, eps=1e-5)
        self.attn = SelfAttention(d_model, n_heads, n_heads)
        self.fc_in = nn.Linear(d_model, d_ff, bias=False)
        self.fc_out = nn.Linear(d_ff, d_model, bias=False)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        hidden_states = self.ln_1(x)
        attn_output, _ = self.attn(hidden_states)
        feed_forward = self.fc_out(self.act(self.fc_in(hidden_states)))
        return attn_output + feed_forward + x


class LatentAttention(nn.Module):
    def __init__(self, d_model, n_heads, kv_rank, rope_dim, nope_dim, v_dim):
        super().__init__()
        self.num_heads, self.kv_lora_rank = n_heads, kv_rank
        self.qk_rope_head_dim, self.qk_nope_head_dim, self.v_head_dim = rope_dim, nope_dim, v_dim
        self.q_proj = nn.Linear(d_model, n_heads * (nope_dim + rope_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d_model, kv_rank + rope_dim, bias=False)
        self.kv_a_layernorm = LlamaRMSNorm(kv_rank)
        self.kv_b_proj = nn.Linear(kv_rank, n_heads * (nope_dim + v_dim), bias=False)
        self.o_proj = nn.Linear(n_heads * v_dim, d_model, bias=False)
        self.softmax_scale = (nope_dim + rope_dim) ** -0.5

    def forward(self, x, cache=None):
        bsz, q_len, _ = x.shape
        past = 0 if cache is None else cache[0].shape[1]
        positions = torch.arange(past, past + q_len)
        q = self.q_proj(x).view(bsz, q_len, self.num_heads, -1).transpose(1, 2)
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        compressed_kv, k_pe = self.kv_a_proj_with_mqa(x).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        compressed_kv = self.kv_a_layernorm(compressed_kv)
        q_pe = rotate(q_pe, positions)
        k_pe = rotate(k_pe.unsqueeze(1), positions).squeeze(1)
        if cache is not None:
            compressed_kv = torch.cat([cache[0], compressed_kv], dim=1)
            k_pe = torch.cat([cache[1], k_pe], dim=1)
        kv = self.kv_b_proj(compressed_kv)
        kv = kv.view(bsz, past + q_len, self.num_heads, -1).transpose(1, 2)
        k_nope, value_states = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k_pe_heads = k_pe.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
        attn_output = F.scaled_dot_product_attention(
            torch.cat([q_nope, q_pe], dim=-1),
            torch.cat([k_nope, k_pe_heads], dim=-1),
            value_states,
            attn_mask=causal_mask(q_len, past + q_len),
            scale=self.softmax_scale,
        )
        attn_output = attn_output.transpose(1, 2).flatten(2)
        return self.o_proj(attn_output), (compressed_kv, k_pe)


class SwitchFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts):
        super().__init__()
        self.num_experts = n_experts
        self.gate = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList([LlamaMLP(d_model, d_ff) for _ in range(n_experts)])

    def forward(self, x):
        hidden_states = x.view(-1, x.shape[-1])
        routing_probs = F.softmax(self.gate(hidden_states), dim=-1)
        expert_index = routing_probs.argmax(dim=-1)
        expert_mask = F.one_hot(expert_index, self.num_experts)
        final = torch.zeros_like(hidden_states)
        for i, expert in enumerate(self.experts):
            token_indices = torch.where(expert_index == i)[0]
            weight = routing_probs[token_indices, i].unsqueeze(-1)
            final = final.index_add(0, token_indices, weight * expert(hidden_states[token_indices]))
        fraction = expert_mask.to(x.dtype).mean(dim=0)
        aux_loss = self.num_experts * torch.sum(fraction * routing_probs.mean(dim=0))
        return final.view_as(x), aux_loss


class MixtralFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.num_experts = n_experts
        self.gate = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList([LlamaMLP(d_model, d_ff) for _ in range(n_experts)])

    def forward(self, x):
        batch_size, sequence_length, hidden_dim = x.shape
        hidden_states = x.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
        final_hidden_states = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            idx, top_x = torch.where(expert_mask[expert_idx])
            current = self.experts[expert_idx](hidden_states[top_x])
            current = current * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)


class LoRALinear(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.base_layer = linear
        for parameter in self.base_layer.parameters():
            parameter.requires_grad = False
        dtype = linear.weight.dtype
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False, dtype=dtype)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling

    @torch.no_grad()
    def merged(self):
        base = self.base_layer
        layer = nn.Linear(
            base.in_features,
            base.out_features,
            bias=base.bias is not None,
            dtype=base.weight.dtype,
        )
        layer.weight.copy_(base.weight + self.scaling * self.lora_B.weight @ self.lora_A.weight)
        if base.bias is not None:
            layer.bias.copy_(base.bias)
        return layer


def next_token_loss(logits, ids, mask=None):
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = ids[..., 1:].contiguous()
    if mask is not None:
        both = mask[..., 1:] & mask[..., :-1]
        shift_labels = shift_labels.masked_fill(~both, -100)
    return F.cross_entropy(
        shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1), ignore_index=-100
    )


def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    scores = logits / temperature
    if top_k is not None:
        top_k = min(top_k, scores.size(-1))
        indices_to_remove = scores < torch.topk(scores, top_k)[0][..., -1, None]
        scores = scores.masked_fill(indices_to_remove, -float("inf"))
    if top_p is not None:
        sorted_logits, sorted_indices = torch.sort(scores, descending=True)
        cumulative_probs = sorted_logits.softmax(dim=-1).cumsum(dim=-1)
        sorted_remove = cumulative_probs >= top_p
        sorted_remove[..., 1:] = sorted_remove[..., :-1].clone()
        sorted_remove[..., 0] = False
        remove = sorted_remove.scatter(1, sorted_indices, sorted_remove)
        scores = scores.masked_fill(remove, -float("inf"))
    probs = F.softmax(scores, dim=-1)
    return torch.multinomial(probs, num_samples=1, generator=generator)


@torch.no_grad()
def generate(model, ids, max_new_tokens, eos_id=None):
    past_key_values = None
    input_ids = ids
    unfinished = torch.ones(ids.shape[0], dtype=torch.long)
    for _ in range(max_new_tokens):
        logits, past_key_values = model(input_ids, past_key_values)
        next_tokens = logits[:, -1, :].argmax(dim=-1)
        if eos_id is not None:
            next_tokens = next_tokens * unfinished + eos_id * (1 - unfinished)
        ids = torch.cat([ids, next_tokens[:, None]], dim=-1)
        input_ids = next_tokens[:, None]
        if eos_id is not None:
            unfinished = unfinished * (next_tokens != eos_id).long()
            if unfinished.max() == 0:
                break
    return ids


def speculate(target, draft, ids, n_draft):
    candidate_input_ids = ids
    for _ in range(n_draft):
        next_token = draft(candidate_input_ids)[:, -1].argmax(-1, keepdim=True)
        candidate_input_ids = torch.cat((candidate_input_ids, next_token), dim=-1)
    new_logits = target(candidate_input_ids)[:, ids.shape[1] - 1 :]
    selected_tokens = new_logits.argmax(dim=-1)
    candidate_new_tokens = candidate_input_ids[:, ids.shape[1] :]
    agree = (candidate_new_tokens == selected_tokens[:, :-1]).long()
    n_matches = int(agree.cumprod(dim=-1).sum())
    return selected_tokens[:, : n_matches + 1]


def block_parameters(d_model, n_q_heads, n_kv_heads, d_ff):
    head_dim = d_model // n_q_heads
    attn = d_model * head_dim * (n_q_heads + 2 * n_kv_heads) + n_q_heads * head_dim * d_model
    mlp = 3 * d_model * d_ff
    return attn + mlp + 2 * d_model


def kv_cache_bytes(n_layers, n_kv_heads, head_dim, length, batch=1, bytes_per_element=2):
    return 2 * n_layers * n_kv_heads * head_dim * length * batch * bytes_per_element
