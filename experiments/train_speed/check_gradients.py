#!/usr/bin/env python3
"""Holds our loss and gradients against PyTorch's autograd, parameter by parameter.

  check_gradients.py [--build build/cuda-release] [--device cuda] [--dtype fp32 bf16] [--case NAME ...]

gradient_dump runs our forward and backward on one random batch and writes what it had and what came out; PyTorch
computes the same model (pytorch_model.py) from the same weights and tokens, in fp32, with matrices rounded to bf16 when
ours are. Asked of every parameter: cosine > 0.9999 in fp32 and > 0.999 in bf16, and norms that agree to 1 % and 2 %;
of the loss: 1e-5 and 2e-3, relative. In bf16 PyTorch's own bf16 gradients are held against the same, for comparison.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch

from pytorch_model import Config, Model

# Head sizes 64, 80, 96, 128; grouped queries; odd lengths and widths; tied and untied heads; recomputation;
# queries and keys normed by head, as Qwen 3 has them; several documents a sequence, which begin at 0 and at CUTS.
LLAMA = dict(family="llama", num_layers=3, dim=256, num_heads=4, num_kv_heads=2, ffn_dim=712, vocab_size=1000, max_seq_len=256)
CUTS = (1, 37, 100, 164)
CASES = {
    "llama-64": (LLAMA, 4, 256, {}),
    "llama-80": (dict(LLAMA, dim=320, head_dim=80, num_kv_heads=4), 2, 199, {}),
    "llama-96": (dict(LLAMA, dim=384, head_dim=96), 3, 128, {}),
    "llama-128": (dict(LLAMA, dim=512, head_dim=128, num_kv_heads=1, rope_theta=500000.0), 2, 255, {}),
    "llama-tied": (dict(LLAMA, tied_embedding=True, vocab_size=1536), 2, 256, {}),
    "llama-recompute": (LLAMA, 4, 256, {"training.recompute": "block"}),
    "qwen3-64": (dict(LLAMA, qk_norm=True), 3, 201, {}),
    "qwen3-128": (dict(LLAMA, dim=512, head_dim=128, qk_norm=True), 2, 256, {}),
    "documents-64": (LLAMA, 3, 256, {"cut": CUTS}),
    "documents-80": (dict(LLAMA, dim=320, head_dim=80, num_kv_heads=4), 2, 199, {"cut": CUTS}),
    "documents-128": (dict(LLAMA, dim=512, head_dim=128, qk_norm=True), 2, 255, {"cut": CUTS}),
    "llama-768": (dict(LLAMA, num_layers=4, dim=768, num_heads=12, num_kv_heads=12, ffn_dim=2048, vocab_size=50304, max_seq_len=1024), 2, 1024, {}),
    "gpt2": (dict(LLAMA, family="gpt2", num_kv_heads=4, ffn_dim=1024, tied_embedding=True), 3, 250, {}),
}
COSINE = {"fp32": 0.9999, "bf16": 0.999}
NORM = {"fp32": 0.01, "bf16": 0.02}
LOSS = {"fp32": 1e-5, "bf16": 2e-3}


def dump(args, folder, model, B, T, sets, dtype):
    config = os.path.join(folder, "config.toml")
    with open(config, "w") as f:
        f.write("[model]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in model.items()))
    sets = {"device": args.device, "training.dtype": dtype, "training.seq_len": T, "training.global_batch_size": B, **sets}
    command = [args.program or os.path.join(args.build, "bin", "gradient_dump"), config, folder]
    cuts = sets.pop("cut", ())
    command += ["--cut", *map(str, cuts)] if cuts else []
    for key, value in sets.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"gradient_dump ended with {done.returncode}")
    with open(os.path.join(folder, "dump.json")) as f:
        out = json.load(f)
    for key in "weights", "gradients":
        out[key] = np.fromfile(os.path.join(folder, key + ".bin"), dtype="<f4")
    out["documents"] = list(zip((0, *cuts), (*cuts, T)))
    out["ids"] = torch.from_numpy(np.fromfile(os.path.join(folder, "ids.bin"), dtype="<i4").reshape(2, B, T)).long()
    return out


def parts(c):
    """(our tensor's name, PyTorch's parameter, its rows from, to) for each tensor of ours."""
    q, kv = c.H * c.D, c.K * c.D
    if c.gpt2:
        names = [("transformer.wte.weight", "tokens"), ("transformer.wpe.weight", "positions")]
        for l in range(c.L):
            ours, theirs = f"transformer.h.{l}.", f"blocks.{l}."
            for a, b in (("ln_1", "norm1"), ("attn.c_attn", "qkv"), ("attn.c_proj", "o"), ("ln_2", "norm2"),
                         ("mlp.c_fc", "up"), ("mlp.c_proj", "down")):
                names += [(ours + a + s, theirs + b + s) for s in (".weight", ".bias")]
        names += [("transformer.ln_f" + s, "norm" + s) for s in (".weight", ".bias")]
        return [(a, b, None, None) for a, b in names]
    out = [("model.embed_tokens.weight", "tokens", None, None), ("model.norm.weight", "norm.weight", None, None)]
    if not c.tied:
        out.append(("lm_head.weight", "head.weight", None, None))
    for l in range(c.L):
        ours, theirs = f"model.layers.{l}.", f"blocks.{l}."
        out += [(ours + "input_layernorm.weight", theirs + "norm1.weight", None, None),
                (ours + "post_attention_layernorm.weight", theirs + "norm2.weight", None, None),
                (ours + "self_attn.q_proj.weight", theirs + "qkv.weight", 0, q),
                (ours + "self_attn.k_proj.weight", theirs + "qkv.weight", q, q + kv),
                (ours + "self_attn.v_proj.weight", theirs + "qkv.weight", q + kv, q + 2 * kv),
                (ours + "self_attn.o_proj.weight", theirs + "o.weight", None, None),
                (ours + "mlp.gate_proj.weight", theirs + "up.weight", 0, c.F),
                (ours + "mlp.up_proj.weight", theirs + "up.weight", c.F, 2 * c.F),
                (ours + "mlp.down_proj.weight", theirs + "down.weight", None, None)]
        if c.qk_norm:
            out += [(ours + f"self_attn.{a}_norm.weight", theirs + f"{a}_norm.weight", None, None) for a in "qk"]
    return out


def pytorch(c, ours, dtype, rounded, device):
    """Loss and gradients by name of ours."""
    tensors = {t["name"]: t for t in ours["tensors"]}
    model = Model(c, dtype)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, theirs, begin, end in parts(c):
            t = tensors[name]
            count = int(np.prod(t["shape"]))
            w = torch.from_numpy(ours["weights"][t["offset"]:t["offset"] + count].reshape(t["shape"]))
            named[theirs][begin:end].copy_(w.bfloat16().float() if rounded and t["matrix"] else w)
    model = model.to(device)
    inputs, targets = ours["ids"].to(device)
    targets = torch.where(targets < 0, -100, targets)  # PyTorch's ignored index
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = 0.0
        for begin, end in ours["documents"]:  # a document is a sequence of its own
            part = model(inputs[:, begin:end], targets[:, begin:end], reduction="sum")
            part.backward()
            loss += part.item()
    named = dict(model.named_parameters())
    return loss, {name: named[theirs].grad[begin:end].float().cpu().numpy().ravel() for name, theirs, begin, end in parts(c)}


def cosine(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    scale = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / scale) if scale > 0 else float(np.linalg.norm(a) == np.linalg.norm(b))


def check(args, name, dtype):
    model, B, T, sets = CASES[name]
    c = Config(model)
    with tempfile.TemporaryDirectory() as folder:
        ours = dump(args, folder, model, B, T, sets, dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loss, truth = pytorch(c, ours, torch.float32, dtype == "bf16", device)
    peers = pytorch(c, ours, torch.bfloat16, True, device)[1] if dtype == "bf16" else None
    failures, worst, worst_peer = [], (2.0, ""), (2.0, "")
    for t in ours["tensors"]:
        want = truth[t["name"]]
        got = ours["gradients"][t["offset"]:t["offset"] + want.size]
        value = cosine(got, want)
        worst = min(worst, (value, t["name"]))
        if peers is not None:
            worst_peer = min(worst_peer, (cosine(peers[t["name"]], want), t["name"]))
        ratio = np.linalg.norm(got.astype(np.float64)) / max(np.linalg.norm(want.astype(np.float64)), 1e-300)
        if not value > COSINE[dtype] or not abs(ratio - 1) < NORM[dtype]:
            failures.append(f"{t['name']}: cosine {value:.6f}, norm ratio {ratio:.5f}")
    if not abs(ours["loss"] / loss - 1) < LOSS[dtype]:
        failures.append(f"loss {ours['loss']}, want {loss}")
    peer = f", PyTorch's bf16 {worst_peer[0]:.6f}" if peers is not None else ""
    print(f"{'ok  ' if not failures else 'FAIL'} {name:<16}{dtype:<6}loss {ours['loss'] / ours['num_tokens']:.6f} (want {loss / ours['num_tokens']:.6f})  "
          f"worst cosine {worst[0]:.6f} ({worst[1]}){peer}", flush=True)
    for line in failures[:6]:
        print("    " + line)
    return not failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/cuda-release")
    parser.add_argument("--program", help="gradient_dump, when it lies elsewhere")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    good = True
    for name in args.case:
        for dtype in args.dtype:
            try:
                good = check(args, name, dtype) and good
            except RuntimeError as error:
                print(f"FAIL {name:<16}{dtype:<6}{error}", flush=True)
                good = False
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
