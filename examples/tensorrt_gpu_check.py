"""Confirms on a GPU what a machine without one cannot: engines run, their numbers, plugins, and times.

    pip install 'attnres-compile[tensorrt,gpu,hf]' && python examples/tensorrt_gpu_check.py

Builds a language model with TensorRT for the GPU at hand, without and with plugins, runs each engine at three sizes on
random tokens, compares with PyTorch, and times both beside the residual original. The plugins are those of both phases,
with the add before and the norm after a read; `--norm layer` is for those with LayerNorm.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attnres_compile as ac
from attnres_compile.exporters.tensorrt import PRECISIONS

ALLOWED = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 6e-2}  # of the largest logit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp16")
    parser.add_argument("--norm", choices=("rms", "layer"), default="rms", help="Llama's or GPT-2's")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this check needs an NVIDIA GPU that PyTorch can use")
    import tensorrt as trt

    print(f"{torch.cuda.get_device_name()}, TensorRT {trt.__version__}, torch {torch.__version__}, {options.precision}")
    original = language_model(options.norm, options.layers, options.width, options.length)
    tokens = torch.randint(1000, (2, 64))
    model = ac.transform(copy.deepcopy(original), {"input_ids": tokens}, num_blocks=options.blocks, verify="quick")
    for name, parameter in model.named_parameters():
        if name.startswith("attnres") and name.endswith("query"):
            nn.init.normal_(parameter, std=0.05)
    failed = False
    variants = [("original", original, False), ("no plugin", model, False), ("plugins", model, True)]
    with tempfile.TemporaryDirectory() as folder:
        for name, variant, plugins in variants:
            path = Path(folder) / f"{name}.engine"
            try:
                result = ac.export_tensorrt(
                    variant,
                    {"input_ids": tokens},
                    path,
                    precision=options.precision,
                    dynamic_shapes={"input_ids": {0: (1, 1, 4), 1: (1, options.length, options.length)}},
                    output=attrgetter("logits"),
                    runtime="tensorrt",
                    plugins=plugins,
                    echo=None,
                )
                engine = Engine(trt, path)
                reference = copy.deepcopy(variant).to("cuda", PRECISIONS[options.precision])
                sizes = [(1, 1), (2, 17), (4, options.length)]
                worst = max(difference(engine, reference, size) for size in sizes)
                good = worst <= ALLOWED[options.precision]
                microseconds = time(engine, torch.randint(1000, (1, options.length), device="cuda"))
                taken = f", {sum(read.plugin for read in result.reads)} of them plugins" if plugins else ""
                print(
                    f"{'✓' if good else '✗'} {name:10} {result.kernels} kernels, {len(result.reads)} reads{taken}, "
                    f"max difference {worst:.1e}, {microseconds:.0f} µs at 1 × {options.length}"
                )
            except Exception as error:  # each variant is a check of its own
                good = False
                print(f"✗ {name:10} {type(error).__name__}: {error}")
            failed |= not good
    sys.exit(failed)


def language_model(norm: str, layers: int, width: int, length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if norm == "layer":
        sizes = {"vocab_size": 1000, "n_embd": width, "n_layer": layers, "n_head": width // 64, "n_positions": length}
        return GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=length,
    )
    return LlamaForCausalLM(config).eval()


class Engine:
    """An engine with one input and one output."""

    def __init__(self, trt: Any, path: Path) -> None:
        self.runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        self.context = self.engine.create_execution_context()
        self.input, self.output = (self.engine.get_tensor_name(i) for i in range(2))
        self.types = {trt.DataType.FLOAT: torch.float32, trt.DataType.HALF: torch.float16}
        self.types[trt.DataType.BF16] = torch.bfloat16

    def __call__(self, tokens: Tensor) -> Tensor:
        tokens = tokens.contiguous()
        self.context.set_input_shape(self.input, tuple(tokens.shape))
        dtype = self.types[self.engine.get_tensor_dtype(self.output)]
        result = torch.empty(tuple(self.context.get_tensor_shape(self.output)), dtype=dtype, device="cuda")
        self.context.set_tensor_address(self.input, tokens.data_ptr())
        self.context.set_tensor_address(self.output, result.data_ptr())
        stream = torch.cuda.current_stream()
        if not self.context.execute_async_v3(stream.cuda_stream):
            raise RuntimeError("the engine did not run")
        stream.synchronize()
        return result


def difference(engine: Engine, model: nn.Module, size: tuple[int, int]) -> float:
    """Largest difference from PyTorch in fp32, relative to the largest logit."""
    tokens = torch.randint(1000, size, device="cuda")
    with torch.no_grad():
        expected = model.float()(tokens, use_cache=False).logits
    return float((engine(tokens).float() - expected).abs().max() / expected.abs().max())


def time(engine: Engine, tokens: Tensor) -> float:
    """Median of 50 runs in microseconds, after 10 more."""
    times = []
    for _ in range(60):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        engine(tokens)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return sorted(times[10:])[25]


if __name__ == "__main__":
    main()
