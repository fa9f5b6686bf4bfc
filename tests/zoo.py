"""Small models of many architectures, with random weights and no downloads.

Each case builds one model: four layers, width 32, a vocabulary of 97, so that a forward takes milliseconds. Dropout is
on wherever the architecture has it: equality in train mode under equal seeds is a real test then. Parameters are moved
a little from their initial values, since a bias of zero or a norm weight of one would hide mistakes. Settings that a
case does not name keep the defaults of its library: attention kernels, and the key-value cache, which is on.

All models run in float32 and float64, in eval and in train mode. In float64 many still go through float32 on the way
(RMS norms, softmax, rotary tables): `Case.pure64` is False for those, and their float64 results are repeatable, but
not more exact than float32.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.export import Dim

from tests import own_models

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VOCAB, WIDTH, HEADS, LAYERS = 97, 32, 4, 4
DROPOUT = 0.1

M = TypeVar("M", bound=nn.Module)
Inputs: TypeAlias = Callable[[int, int], dict[str, Tensor]]
Dynamic: TypeAlias = dict[str, dict[int, Any]]
Settings: TypeAlias = dict[str, Any]


class Build(Protocol):
    """Makes the model, with a given number of layers in each of its stacks."""

    def __call__(self, layers: int = LAYERS) -> nn.Module: ...


@dataclass(frozen=True)
class Case:
    """One model of the zoo, and what is known about its residual streams."""

    name: str
    build: Build
    inputs: Inputs
    """Batch and length to keyword arguments; equal numbers give equal tensors."""
    dynamic: Dynamic
    """The `dynamic_shapes` of `torch.export` for those keyword arguments."""
    adds: tuple[int, ...] = ()
    """`stream + f` events of each chain, in order of execution; empty where no chain qualifies."""
    sublayers: tuple[int, ...] = ()
    """As `adds`, but all that is pushed between two states that are read counts once."""
    output: Callable[[Any], Tensor] = attrgetter("logits")
    length_matters: bool = True
    """False where `inputs` ignores the length, as images do."""
    pure64: bool = True
    """Whether a float64 copy computes in float64 throughout."""
    layers: int = LAYERS
    """The number of layers that `adds` and `sublayers` stand for; they are proportional to it."""

    @property
    def refused(self) -> bool:
        """Whether a transform has to refuse this model."""
        return not self.adds


def seeded(make: Callable[[], M], seed: int = 0) -> M:
    """Make a module in eval mode from a seed, move its parameters, and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = make().eval()
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


# Inputs

BATCH = Dim("batch", min=2, max=64)
LENGTH = Dim("length", min=2, max=60)
# the two towers of a contrastive model may see different batches
IMAGE_BATCH = Dim("image_batch", min=2, max=64)


def generator(batch: int, length: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * batch + length)


def ids(batch: int, length: int) -> Tensor:
    """Tokens without the special ones, which have the numbers 0, 1, 2."""
    return torch.randint(3, VOCAB, (batch, length), generator=generator(batch, length))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(shape[0], shape[1]))


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": ids(batch, length)}


def images(batch: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": noise(batch, 3, 32, 32)}


def tokens_twice(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": ids(batch, length), "decoder_input_ids": ids(batch, length + 1)}


def sound_and_tokens(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_features": noise(batch, 16, 32), "decoder_input_ids": ids(batch, length)}


def tokens_and_images(batch: int, length: int) -> dict[str, Tensor]:
    return tokens(batch, length) | images(batch, length)


TOKENS: Dynamic = {"input_ids": {0: BATCH, 1: LENGTH}}
IMAGES: Dynamic = {"pixel_values": {0: BATCH}}
TOKENS_TWICE: Dynamic = TOKENS | {"decoder_input_ids": {0: BATCH, 1: LENGTH + 1}}
SOUND_AND_TOKENS: Dynamic = {"input_features": {0: BATCH}, "decoder_input_ids": {0: BATCH, 1: LENGTH}}
TOKENS_AND_IMAGES: Dynamic = TOKENS | {"pixel_values": {0: IMAGE_BATCH}}


# Settings of the transformers library

SPECIAL: Settings = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
SIZES: Settings = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": HEADS}
IMAGE: Settings = SIZES | {"image_size": 32, "patch_size": 8}
TEXT: Settings = SPECIAL | SIZES | {"pad_token_id": 0}
POSITIONS: Settings = {"max_position_embeddings": 64}

ATTENTION_DROPOUT: Settings = {"attention_dropout": DROPOUT}
HIDDEN_DROPOUT: Settings = ATTENTION_DROPOUT | {"hidden_dropout": DROPOUT}
BERT_DROPOUT: Settings = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
GPT_DROPOUT: Settings = {"resid_pdrop": DROPOUT, "embd_pdrop": DROPOUT, "attn_pdrop": DROPOUT}
CODER_DROPOUT: Settings = ATTENTION_DROPOUT | {"dropout": DROPOUT, "activation_dropout": DROPOUT}

LLAMA = TEXT | ATTENTION_DROPOUT | {"num_key_value_heads": 2}
GEMMA = LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}
# the default kernel, a grouped matmul, takes no float64, and the eager loop over the experts cannot be exported
EXPERTS = LLAMA | {"experts_implementation": "batched_mm", "num_experts_per_tok": 2}
DEEPSEEK = EXPERTS | {"num_key_value_heads": HEADS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2}
DEEPSEEK |= {"topk_group": 1, "moe_intermediate_size": WIDTH, "first_k_dense_replace": 1, "kv_lora_rank": 16}
DEEPSEEK |= {"q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GRANITE = LLAMA | {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 0.3}
GPT = SPECIAL | GPT_DROPOUT | {"n_embd": WIDTH, "n_head": HEADS, "n_positions": 64}
FALCON = TEXT | HIDDEN_DROPOUT | {"new_decoder_architecture": True, "num_kv_heads": 2}
OPT = TEXT | POSITIONS | ATTENTION_DROPOUT | {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}
BLOOM = SPECIAL | HIDDEN_DROPOUT | {"hidden_size": WIDTH, "n_head": HEADS, "pad_token_id": 0}
MAMBA = SPECIAL | {"hidden_size": WIDTH, "num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 2}
MAMBA |= {"chunk_size": 8, "pad_token_id": 0}
MODERN = TEXT | POSITIONS | ATTENTION_DROPOUT | {"embedding_dropout": DROPOUT, "mlp_dropout": DROPOUT}
MODERN |= {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
CODER = SPECIAL | {"d_model": WIDTH, "pad_token_id": 0, "decoder_start_token_id": 1}
T5 = CODER | {"d_kv": 8, "d_ff": 2 * WIDTH, "num_heads": HEADS, "dropout_rate": DROPOUT}
BART = CODER | CODER_DROPOUT | {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
BART |= {"encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH}
WHISPER = BART | {"num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 64}
CONTRASTIVE: Settings = {
    "text_config": TEXT | POSITIONS | ATTENTION_DROPOUT | {"projection_size": WIDTH},
    "vision_config": IMAGE | ATTENTION_DROPOUT,
}
DINO = IMAGE | BERT_DROPOUT | {"mlp_ratio": 2, "drop_path_rate": DROPOUT}


# Cases


def hugging(model: str, settings: Settings, *depths: str, config: str | None = None) -> Build:
    """A builder of a transformers model.

    `depths` names the settings that hold the number of layers, as "text_config.depth" inside another. The name of the
    config's class follows from the model's.
    """
    prefix = model.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")

    def build(layers: int = LAYERS) -> nn.Module:
        library = importlib.import_module("transformers")
        values = dict(settings)
        for depth in depths or ("num_hidden_layers",):
            group, _, name = depth.rpartition(".")
            values |= {group: values[group] | {name: layers}} if group else {name: layers}
        return seeded(lambda: getattr(library, model)(getattr(library, config or f"{prefix}Config")(**values)))

    return build


def text(name: str, build: Build, *adds: int, sublayers: tuple[int, ...] = (), **known: Any) -> Case:
    """A model of one text."""
    return Case(name, build, tokens, known.pop("dynamic", TOKENS), adds, sublayers or adds, **known)


def texts(name: str, build: Build, *adds: int, **known: Any) -> Case:
    """A model of two texts: one for the encoder, one for the decoder."""
    return Case(name, build, tokens_twice, TOKENS_TWICE, adds, adds, **known)


def vision(name: str, build: Build, *adds: int, output: str = "logits") -> Case:
    return Case(name, build, images, IMAGES, adds, adds, attrgetter(output), length_matters=False)


def contrastive(name: str, model: str) -> Case:
    """A model of images and texts; the images run first."""
    build = hugging(model, CONTRASTIVE, "text_config.num_hidden_layers", "vision_config.num_hidden_layers")
    return Case(name, build, tokens_and_images, TOKENS_AND_IMAGES, (8, 8), (8, 8), attrgetter("logits_per_text"))


def own(make: Callable[[int], nn.Module]) -> Build:
    return lambda layers=LAYERS: seeded(lambda: make(layers))


def itself(output: Tensor) -> Tensor:
    return output


DECODERS = (
    text("llama", hugging("LlamaForCausalLM", LLAMA), 8, pure64=False),
    text("gpt2", hugging("GPT2LMHeadModel", GPT, "n_layer"), 8),
    text("qwen2", hugging("Qwen2ForCausalLM", LLAMA), 8, pure64=False),
    text("qwen3", hugging("Qwen3ForCausalLM", LLAMA | {"head_dim": 8}), 8, pure64=False),
    text(
        "qwen3_moe",
        hugging("Qwen3MoeForCausalLM", EXPERTS | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": WIDTH}),
        8,
        pure64=False,
    ),
    text("mistral", hugging("MistralForCausalLM", LLAMA | {"sliding_window": 6}), 8, pure64=False),
    text("mixtral", hugging("MixtralForCausalLM", EXPERTS | {"num_local_experts": 4}), 8, pure64=False),
    text("gemma2", hugging("Gemma2ForCausalLM", GEMMA), 8, pure64=False),
    text("gemma3", hugging("Gemma3ForCausalLM", GEMMA, config="Gemma3TextConfig"), 8, pure64=False),
    text("phi3", hugging("Phi3ForCausalLM", LLAMA | GPT_DROPOUT), 8, pure64=False),
    # mlp + attention + x: one add on the stream in each layer
    text("gpt_neox", hugging("GPTNeoXForCausalLM", TEXT | HIDDEN_DROPOUT), 4),
    text("gptj", hugging("GPTJForCausalLM", GPT | {"rotary_dim": 4}, "n_layer"), 4),
    text("falcon", hugging("FalconForCausalLM", FALCON), 4),
    # x + attention + mlp: two adds in each layer, but nobody reads the state between them
    text("cohere", hugging("CohereForCausalLM", LLAMA), 8, sublayers=(4,), pure64=False),
    text("opt", hugging("OPTForCausalLM", OPT), 8),
    text("bloom", hugging("BloomForCausalLM", BLOOM, "n_layer"), 8, pure64=False),
    text("granite", hugging("GraniteForCausalLM", GRANITE), 8, pure64=False),
    text("deepseek_v3", hugging("DeepseekV3ForCausalLM", DEEPSEEK), 8, pure64=False),
    # it pads the length to whole chunks, which can be exported for a fixed length only; its logits are always float32
    text("mamba2", hugging("Mamba2ForCausalLM", MAMBA), 4, dynamic={"input_ids": {0: BATCH}}, pure64=False),
    text("olmo2", hugging("Olmo2ForCausalLM", LLAMA), 8, pure64=False),
    text("nanogpt", own(lambda n: own_models.NanoGPT(n, VOCAB, WIDTH, HEADS, DROPOUT)), 8, output=itself),
)

CODERS = (
    text("modernbert", hugging("ModernBertForMaskedLM", MODERN), 8, pure64=False),
    Case(
        "torch_encoder",
        own(lambda n: own_models.torch_encoder(n, WIDTH, HEADS, DROPOUT)),
        lambda batch, length: {"src": noise(batch, length, WIDTH)},
        {"src": {0: BATCH, 1: LENGTH}},
        (8,),
        (8,),
        itself,
    ),
    # the encoder has two adds in each layer, the decoder three
    texts("t5", hugging("T5ForConditionalGeneration", T5, "num_layers", "num_decoder_layers"), 8, 12, pure64=False),
    Case(
        "whisper",
        hugging("WhisperForConditionalGeneration", WHISPER, "encoder_layers", "decoder_layers"),
        sound_and_tokens,
        SOUND_AND_TOKENS,
        (8, 12),
        (8, 12),
    ),
)

VISION = (
    vision("vit", hugging("ViTForImageClassification", IMAGE | BERT_DROPOUT), 8),
    vision("dinov2", hugging("Dinov2ForImageClassification", DINO), 8),
    # its pooling head has one more add, on a stream of its own that is too short for a chain
    vision("siglip_vision", hugging("SiglipVisionModel", IMAGE | ATTENTION_DROPOUT), 8, output="pooler_output"),
    contrastive("siglip", "SiglipModel"),
    contrastive("clip", "CLIPModel"),
)

# a norm, or an activation, follows each add: the sum is not kept
REFUSED = (
    text("bert", hugging("BertForMaskedLM", TEXT | BERT_DROPOUT)),
    text("roberta", hugging("RobertaForMaskedLM", TEXT | BERT_DROPOUT)),
    texts("bart", hugging("BartForConditionalGeneration", BART | POSITIONS, "encoder_layers", "decoder_layers")),
    Case(
        "resnet",
        own(lambda n: own_models.resnet(n, WIDTH)),
        lambda batch, length: {"input": noise(batch, 3, 32, 32)},
        {"input": {0: BATCH}},
        output=itself,
        length_matters=False,
    ),
)

CASES: dict[str, Case] = {case.name: case for case in (*DECODERS, *CODERS, *VISION, *REFUSED)}
