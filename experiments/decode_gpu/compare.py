"""Greedy texts of tiny models: decode_bench_gpu --check against the same model written plainly in PyTorch, fp32.

python3 compare.py FILE    FILE as decode_bench_gpu --check wrote it

The whole sequence is computed again for every token, in fp32 (no TF32) on the GPU where there is one.
A token that differs is shown with the difference of the two logits: below 1e-4 it is a tie by rounding.
"""
import json
import sys

import numpy
import torch

torch.backends.cuda.matmul.allow_tf32 = False
device = "cuda" if torch.cuda.is_available() else "cpu"


def rms(x, w, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rope(x, theta):
    T, D = x.shape[-2], x.shape[-1]
    angles = torch.arange(T, dtype=torch.float64)[:, None] * theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    cos, sin = angles.cos().float().to(x.device), angles.sin().float().to(x.device)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def logits(m, w, ids):
    H, K, D, T = m["heads"], m["kv_heads"], m["head_size"], len(ids)
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(m["layers"]):
        p = lambda name: w[f"model.layers.{layer}.{name}.weight"]
        h = rms(x, p("input_layernorm"), m["eps"])
        q = (h @ p("self_attn.q_proj").T).view(T, H, D).transpose(0, 1)
        k = (h @ p("self_attn.k_proj").T).view(T, K, D).transpose(0, 1)
        v = (h @ p("self_attn.v_proj").T).view(T, K, D).transpose(0, 1)
        if m["qk_norm"]:
            q, k = rms(q, p("self_attn.q_norm"), m["eps"]), rms(k, p("self_attn.k_norm"), m["eps"])
        q, k = rope(q, m["theta"]), rope(k, m["theta"])
        k, v = k.repeat_interleave(H // K, 0), v.repeat_interleave(H // K, 0)
        scores = q @ k.transpose(1, 2) / D**0.5
        scores = scores.masked_fill(torch.ones(T, T, device=x.device).triu(1).bool(), float("-inf"))
        o = (scores.softmax(-1) @ v).transpose(0, 1).reshape(T, H * D)
        x = x + o @ p("self_attn.o_proj").T
        h = rms(x, p("post_attention_layernorm"), m["eps"])
        x = x + (torch.nn.functional.silu(h @ p("mlp.gate_proj").T) * (h @ p("mlp.up_proj").T)) @ p("mlp.down_proj").T
    head = w["lm_head.weight"] if "lm_head.weight" in w else w["model.embed_tokens.weight"]
    return rms(x[-1], w["model.norm.weight"], m["eps"]) @ head.T


def compare(m):
    flat = torch.from_numpy(numpy.fromfile(m["weights"], dtype=numpy.float32)).to(device)
    w = {}
    for name, t in m["tensors"].items():
        count = int(numpy.prod(t["shape"]))
        w[name] = flat[t["offset"] : t["offset"] + count].view(*t["shape"])
    same = different = 0
    for prompt, text in zip(m["prompts"], m["texts"]):
        ids = list(prompt)
        for i, token in enumerate(text):
            row = logits(m, w, torch.tensor(ids, device=device))
            best = int(row.argmax())
            if best == token:
                same += 1
            else:
                different += 1
                print(f"{m['shape']}: token {i} is {token}, PyTorch's {best}, logits apart {float(row[best] - row[token]):g}")
            ids.append(token)
    print(f"{m['shape']}: {same} of {same + different} tokens are PyTorch's")
    return different


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(1 if sum(compare(json.loads(line)) for line in open(sys.argv[1])) else 0)
