"""Fixtures: a small random checkpoint of every family, converted; the embedded model."""

import atexit
import gc
import importlib.util
import itertools
import json
import os
import signal
import string
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Else sums of a batch differ from those of one row by more than some tests allow, on some CPUs. MKL
# reads it when torch is loaded.
os.environ.setdefault("MKL_CBWR", "AVX2")
# Clients of local servers need no certificates: reading all takes 25 ms a client, or httpx call.
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)
os.environ.pop("SSL_CERT_FILE", None)  # would be read first

import huggingface_hub
import pytest
import torch
import transformers  # loads a class when it is first used: xdist's first process needs none
from hub_server import Hub
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint import Checkpoint, Writer
from cli.parser import Parser
from generate import EMBEDDED
from models.converter import convert
from tokenizer import load_tokenizer

# A shell ignores SIGINT in what it starts in the background, and all children would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("scripted_page")
gc.disable()  # until tests are collected: modules and items stay until the process ends
atexit.register(gc.unfreeze)

ROOT = Path(__file__).parents[1]
HYBRID_CHECKPOINT = ROOT / "checkpoints" / "tiny-hybrid"
COMMON = dict(
    vocab_size=160,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=8,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
# One layer of four has attention; key and value heads differ in number and size.
HYBRID = dict(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=80,
    num_experts=12,
    num_experts_per_tok=3,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
)
FAMILIES = {
    # The sliding window is shorter than the prompts of the tests, so that it matters.
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **COMMON,
            intermediate_size=96,
            num_key_value_heads=2,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    # A dense layer among sparse ones, biases, tied embeddings, head_dim != dim / heads.
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            num_key_value_heads=4,
            head_dim=16,
            num_experts=16,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    ),
    # A shared expert; biases for queries, keys and values only.
    "qwen2_moe": lambda: transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=80,
            num_key_value_heads=4,
            num_experts=12,
            num_experts_per_tok=3,
            mlp_only_layers=[0],
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    ),
    # A dense layer among sparse ones.
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**COMMON | HYBRID, intermediate_size=128, mlp_only_layers=[1])
    ),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeForCausalLM(
        transformers.Qwen3_5MoeTextConfig(**COMMON | HYBRID)
    ),
    # Three streams, sigmoid gates; an index that chooses two of a prompt's blocks.
    "qwen4_exp": lambda: transformers.Qwen4ExpForCausalLM(
        transformers.Qwen4ExpTextConfig(
            **COMMON | HYBRID,
            hc_count=3,
            hc_lowrank=32,
            output_gate_type="sigmoid",
            indexer_n_heads=8,  # with fewer, many scores are 0, and blocks tie
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=8,
            indexer_compress_ratio=4,
            ple_layer_ids=[2],
            ple_embed_dim=128,
            heads_per_ngram=2,
            ngram_vocab_size_base=97,
            make_ngram_vocab_size_divisible_by=8,
            split_ngram_parts=4,
        )
    ),
    # Windows, two kinds of heads and of RoPE, a dense FFN beside the experts, a soft cap that caps.
    "gemma4": lambda: transformers.Gemma4ForCausalLM(
        transformers.Gemma4TextConfig(
            **COMMON,
            intermediate_size=96,
            moe_intermediate_size=48,
            num_key_value_heads=4,
            head_dim=16,
            global_head_dim=32,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            enable_moe_block=True,
            num_experts=12,
            top_k_experts=3,
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
            final_logit_softcapping=5.0,
            tie_word_embeddings=True,
        )
    ),
    # clip_qkv is low enough to clip.
    "olmoe": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(
            **COMMON,
            intermediate_size=48,
            num_key_value_heads=8,
            num_experts=16,
            num_experts_per_tok=4,
            norm_topk_prob=False,
            clip_qkv=0.5,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    # Every second layer has a window; swiglu_limit is low enough to clamp; YaRN.
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **COMMON,
            intermediate_size=96,
            num_key_value_heads=4,
            head_dim=16,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=16,
            swiglu_limit=1.5,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1.5e5,
                "factor": 8.0,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        )
    ),
    # Four multipliers, tied embeddings.
    "granitemoe": lambda: transformers.GraniteMoeForCausalLM(
        transformers.GraniteMoeConfig(
            **COMMON,
            intermediate_size=96,
            num_key_value_heads=2,
            num_local_experts=6,
            num_experts_per_tok=2,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.7,
            logits_scaling=1.5,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    # One layer of four has attention, without RoPE; one group of heads; multipliers.
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridForCausalLM(
        transformers.GraniteMoeHybridConfig(
            **COMMON | {"num_hidden_layers": 4},
            intermediate_size=96,
            shared_intermediate_size=96,
            num_key_value_heads=2,
            num_local_experts=6,
            num_experts_per_tok=2,
            layer_types=[*["linear_attention"] * 2, "full_attention", "linear_attention"],
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=32,
            mamba_chunk_size=64,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.7,
            logits_scaling=1.5,
            tie_word_embeddings=True,
        )
    ),
    # A mixer without an FFN, a dense FFN, a group of heads each; no lower limit of time steps,
    # which transformers has in prompts alone.
    "nemotron_h": lambda: transformers.NemotronHForCausalLM(
        transformers.NemotronHConfig(
            **COMMON | {"num_hidden_layers": 8},
            hybrid_override_pattern="MEM*EM-*",
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=32,
            chunk_size=64,
            n_routed_experts=12,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
            moe_shared_expert_intermediate_size=96,
            routed_scaling_factor=2.5,
            time_step_min=1e-30,
        )
    ),
    # LayerNorm, biases everywhere, LongRoPE.
    "phimoe": lambda: transformers.PhimoeForCausalLM(
        transformers.PhimoeConfig(
            **COMMON,
            intermediate_size=96,
            num_key_value_heads=2,
            num_local_experts=6,
            num_experts_per_tok=2,
            attention_bias=True,
            lm_head_bias=True,
            router_jitter_noise=0.3,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0, 4.0],
                "long_factor": [2.0, 3.0, 4.0, 9.0],
                "short_mscale": 1.2,
                "long_mscale": 1.4,
                "original_max_position_embeddings": 128,
            },
        )
    ),
    # Latent attention without a low-rank query; groups ranked by their best expert.
    "deepseek_v2": lambda: transformers.DeepseekV2ForCausalLM(
        transformers.DeepseekV2Config(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            q_lora_rank=None,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_shared_experts=2,
            first_k_dense_replace=1,
            routed_scaling_factor=1.7,
            n_group=4,
            topk_group=2,
            topk_method="group_limited_greedy",
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "beta_fast": 8,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 32,
            },
        )
    ),
    # Low-rank queries; sigmoid routing; value heads of another size.
    "deepseek_v3": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            q_lora_rank=64,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=24,
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_shared_experts=1,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            n_group=3,
            topk_group=2,
            num_key_value_heads=8,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "beta_fast": 8,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.6,
                "original_max_position_embeddings": 32,
            },
        )
    ),
    # Values as long as queries, more heads than are expanded at once.
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteForCausalLM(
        transformers.Glm4MoeLiteConfig(
            **COMMON | {"num_attention_heads": 20},
            num_key_value_heads=20,
            intermediate_size=128,
            moe_intermediate_size=48,
            q_lora_rank=64,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=24,
            n_routed_experts=12,
            num_experts_per_tok=3,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    ),
    # Sigmoid routing with a bias, an ungated shared expert, a dense first layer, partial RoPE.
    "glm4_moe": lambda: transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            num_key_value_heads=2,
            head_dim=16,
            n_routed_experts=12,
            num_experts_per_tok=3,
            attention_bias=True,
            use_qk_norm=True,
            routed_scaling_factor=1.7,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        )
    ),
    # Short convolutions with biases, one attention layer, a dense first layer, sigmoid routing.
    "lfm2_moe": lambda: transformers.Lfm2MoeForCausalLM(
        transformers.Lfm2MoeConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            num_key_value_heads=2,
            num_experts=12,
            num_experts_per_tok=3,
            num_dense_layers=1,
            routed_scaling_factor=1.7,
            conv_bias=True,
            layer_types=["conv", "full_attention", "conv"],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    # A decay for each channel, latent attention in one layer, other heads there, a dense layer.
    "kimi_linear": lambda: transformers.KimiLinearForCausalLM(
        transformers.KimiLinearConfig(
            **COMMON | {"num_hidden_layers": 4},
            intermediate_size=128,
            moe_intermediate_size=48,
            num_key_value_heads=8,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            linear_head_dim=16,
            linear_num_heads=4,
            num_local_experts=12,
            num_experts_per_tok=3,
            n_group=3,
            topk_group=2,
            layer_types=[*["linear_attention"] * 2, "full_attention", "linear_attention"],
        )
    ),
    # Norms of q and k over all heads, half of each head rotated, an odd number of experts.
    "minimax_m2": lambda: transformers.MiniMaxM2ForCausalLM(
        transformers.MiniMaxM2Config(
            **COMMON,
            intermediate_size=48,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=11,
            num_experts_per_tok=3,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        )
    ),
    # Softmax routing with a bias, two shared experts, RoPE in pairs, a dense first layer.
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeForCausalLM(
        transformers.Ernie4_5_MoeConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            num_key_value_heads=2,
            moe_num_experts=12,
            moe_k=3,
            moe_num_shared_experts=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    # A gate, norms around sublayers, muP, a window but in the last layer, which has no RoPE.
    "afmoe": lambda: transformers.AfmoeForCausalLM(
        transformers.AfmoeConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            num_key_value_heads=2,
            head_dim=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            sliding_window=16,
            num_experts=12,
            num_experts_per_tok=3,
            route_scale=1.7,
            mup_enabled=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    # Heads differ by layer, a gate a head, YaRN of half a head in full layers, a dense first layer.
    "laguna": lambda: transformers.LagunaForCausalLM(
        transformers.LagunaConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=80,
            num_key_value_heads=2,
            head_dim=16,
            num_attention_heads_per_layer=[8, 4, 12],
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            sliding_window=16,
            num_experts=12,
            num_experts_per_tok=3,
            moe_routed_scaling_factor=2.5,
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                    "beta_fast": 8.0,
                    "attention_factor": 1.1,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 1.0,
                },
            },
        )
    ),
    # Sinks and a window in every second layer, no RoPE in the others, a dense first layer.
    "flint": lambda: transformers.FlintForCausalLM(
        transformers.FlintConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=96,
            num_key_value_heads=4,
            head_dim=16,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            sliding_window=16,
            num_experts=12,
            num_experts_per_tok=3,
            mlp_only_layers=[0],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
    # Windows, RoPE by kind of layer.
    "mellum": lambda: transformers.MellumForCausalLM(
        transformers.MellumConfig(
            **COMMON,
            intermediate_size=128,
            moe_intermediate_size=48,
            num_key_value_heads=4,
            head_dim=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            sliding_window=16,
            num_experts=12,
            num_experts_per_tok=3,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        )
    ),
    # Norms around sublayers, a window but in the last layer, which has no RoPE.
    "kolibri1": lambda: transformers.Kolibri1ForCausalLM(
        transformers.Kolibri1Config(
            **COMMON,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=80,
            num_key_value_heads=4,
            head_dim=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            sliding_window=16,
            num_experts=12,
            num_experts_per_tok=3,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
}
# Families whose small models no fused kernels compute, and why. All others have kernels.
NOT_FUSED = {
    "phimoe": "no kernels for Attention, or its norm",  # LayerNorm
    "deepseek_v2": "no kernels for GroupRoutedMoE",  # of its groups of experts
    "deepseek_v3": "no kernels for SigmoidRoutedMoE",
    "kimi_linear": "no kernels for SigmoidRoutedMoE",
}


@dataclass
class Family:
    name: str
    peer: "transformers.PreTrainedModel"  # in fp32, eval mode
    hf_directory: Path
    directory: Path  # converted to fp32


# Files of 10 processor seconds and more. Two workers that take them in this order end together.
LONG_FILES = (
    "test_serve.py",
    "test_codegen.py",
    "test_mtp.py",
    "test_speculate.py",
    "test_tp.py",
    "test_tiny_hybrid.py",
    "test_session.py",
    "test_offload.py",
    "test_hub.py",
    "test_quantize.py",
    "test_model.py",
    "test_batch_speculation.py",
    "test_card_plan.py",
    "test_kernels.py",
    "test_moe_kernels.py",
    "test_published_files.py",
    "test_tool_calls.py",
    "test_properties.py",
    "test_gguf.py",
    "test_benchmark.py",
    "test_tokenizing.py",
    "test_odd_configs.py",
    "test_auto_speculation.py",
    "test_serve_speculation.py",
    "test_indexed_attention.py",
    "test_qwen4_exp.py",
    "test_eval.py",
    "test_tiny_moe.py",
    "test_passes.py",
    "test_download.py",
    "test_command.py",
    "test_messages.py",
    "test_trace.py",
)


# Tests with many cases that take long: `make test` runs every n-th case, `make test-all` all.
THINNED = {
    "test_sampled_text_keeps_its_distribution": 4,
    "test_the_path_of_a_compiled_session": 4,
    "test_a_head_drafts_for_one_sequence": 2,
    "test_the_head_gives_the_tokens_of_plain_decoding": 4,
    "test_a_conversation_goes_on_after_passes": 3,
    "test_a_sampled_answer_without_a_seed_is_drafted_for": 5,
    "test_a_seed_and_logprobs_leave_drafts_out": 5,
    "test_a_step_after_a_pass_is_as_in_plain_decoding": 15,
    "test_a_stop_text_may_end_an_answer_anywhere_in_a_pass": 6,
    "test_answers_side_by_side_and_interrupted_ones": 6,
    "test_any_numbers_of_drafts_by_a_head_leave_greedy_text_as_it_is": 8,
    "test_any_numbers_of_drafts_leave_greedy_text_as_it_is": 31,
    "test_numbers_of_drafts_share_compiled_code": 14,
    "test_streamed_and_whole_answers_are_those_of_plain_steps": 6,
    "test_a_quantized_model_is_the_plain_one_with_its_unpacked_weights": 8,
    "test_a_reader_may_stop_within_accepted_drafts": 4,
    "test_a_process_that_ends_is_resumed": 2,
    "test_an_eager_answer_does_not_load_the_compiler": 2,
    "test_answers_have_the_models_distribution": 8,
    "test_each_sequence_of_a_batch_is_as_if_alone": 6,
    "test_greedy_tokens_are_those_of_plain_decoding": 23,
    "test_greedy_tokens_match_transformers": 9,
    "test_layers_with_and_without_a_window_are_two_compiled_blocks": 2,
    "test_neighbors_never_change_an_answer": 5,
    "test_perplexity_equals_one_window_per_token": 17,
    "test_refused_drafts_are_not_taken_in": 3,
    "test_shards_are_all_of_the_weights": 6,
    "test_speculation_gives_the_tokens_of_plain_decoding": 2,
    "test_steps_between_layers_of_a_prompt_change_no_answer": 2,
    "test_the_same_bits_and_the_copies_that_the_policy_predicts": 6,
    "test_verified_tokens_have_the_models_distribution": 4,
    "test_up_to_four_answers_share_passes": 7,
    "test_neighbors_come_and_go_between_passes": 11,
    "test_a_listing_with_a_value_of_another_type": 5,
    "test_a_watched_answer_has_the_details_of_the_model": 9,
    "test_short_prompts_run_as_steps_of_many_tokens": 3,
    "test_nothing_behind_a_link_is_removed": 3,
    "test_it_finds_the_best_number": 3,
    "test_the_path_of_a_compiled_session_gives_the_same": 3,
    "test_offloading_gives_the_same_text_and_is_counted": 3,
    "test_an_odd_header": 3,
    "test_a_stream_adds_up_to_the_whole_message": 2,
    "test_drafts_are_those_of_transformers": 4,
    "test_a_head_is_quantized_as_its_model_is": 4,
    "test_steps_without_drafts_between_accepted_drafts": 4,
    "test_the_same_logits_whoever_multiplies": 5,
    "test_logits_and_text_of_a_file_of_mixed_types_match_transformers": 6,
    "test_the_best_that_fits_is_chosen": 4,
    "test_following_the_advice_is_never_refused": 2,
    "test_every_format_as_in_plain_pytorch": 6,
    "test_every_key_is_read_as_transformers_does_or_refused": 3,
    "test_one_token_reads_its_experts_without_copying_them": 3,
    "test_offloading_changes_no_bit": 2,
    "test_a_call_after_accepted_drafts_is_as_if_they_had_run_alone": 7,
    "test_several_sequences": 4,
    "test_a_prefix_is_reused": 4,
    "test_decoding": 5,
    "test_refused_drafts_leave_no_trace": 3,
    "test_published_models_have_kernels_in_every_format": 8,
    "test_shards_have_the_kernels_of_the_whole_model": 7,
    "test_logits_of_a_plain_file_match_transformers": 2,
    "test_what_a_quantized_checkpoint_holds": 4,
    "test_short_prompts_of_every_family": 5,
    "test_refused_drafts_in_the_cache_are_never_read": 2,
    "test_neighbors_prompts_take_graphs_between_passes": 3,
    "test_prompts_beside_others_take_graphs_that_are_brief": 3,
    "test_neighbors_and_pages_of_conversations": 4,
    "test_a_session_and_its_head_take_turns": 2,
    "test_the_controller_changes_no_greedy_text": 2,
    "test_lost_states_cost_nothing_but_drafts": 2,
    "test_computing_logits_in_parts_does_not_change_scores": 11,
    "test_a_plan_fits_and_is_not_much_too_small": 5,
    "test_families_with_scales_and_sigmoid_routing_keep_their_bits": 2,
    "test_a_published_model_has_a_plan_by_its_config_alone": 3,
    "test_every_activation_is_applied_whatever_computes_the_product": 5,
    "test_a_prompt_captured_ahead_leaves_the_text_of_every_family": 2,
    "test_ranks_read_their_rows_of_each_range": 3,
    "test_the_cache_takes_the_planned_bytes": 3,
    "test_speculation_over_an_index": 2,
    "test_prefill_equals_token_by_token": 2,
    "test_prompts_with_ends_of_texts_match_transformers": 2,
    "test_the_peers_config_gives_our_args_back": 3,
    "test_passes_are_captured_between_answers": 2,
    "test_a_prompt_in_chunks_equals_one_pass": 2,
}
# One family of each kind of layers: windows, a dense layer beside experts, delta rules, streams and
# an index, heads of two sizes, sinks, Mamba-2, LayerNorm, latent attention, short convolutions.
KINDS_OF_FAMILIES = (
    *("mixtral", "qwen3_moe", "qwen3_next", "qwen4_exp", "gemma4", "gpt_oss", "nemotron_h"),
    *("phimoe", "deepseek_v3", "lfm2_moe", "kimi_linear"),
)
# Tests of what sessions do with any family's states: `make test` runs KINDS_OF_FAMILIES.
OF_EACH_KIND = {
    "test_one_graph_runs_turns_of_every_family_at_all_positions",
    "test_a_prompt_captured_ahead_leaves_the_text_of_every_family",
    "test_a_prompt_in_chunks_and_single_tokens_equals_one_call",
    "test_a_prompt_in_chunks_equals_one_pass",
    "test_prefill_equals_token_by_token",
    "test_prefill_in_two_parts_equals_one",
    "test_sequences_of_a_batch_keep_their_own_positions",
    "test_last_gives_the_logits_of_that_position_only",
    "test_everything_moves_with_a_model",
    "test_bits_per_weight",
    "test_both_expert_paths_agree",
    "test_no_place_differs_in_any_family",
}


def is_of_another_family(item: pytest.Item) -> bool:
    """Return whether a test in OF_EACH_KIND is to run a family whose kind has another one."""
    families = {item.callspec.params.get(name) for name in ("family", "name")} & FAMILIES.keys()
    return bool(families - {*KINDS_OF_FAMILIES})


def pytest_collection_finish() -> None:
    """What is there by now stays until the process ends."""
    if "CHECK_BOUNDS" not in os.environ:  # which looks for tensors
        gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """Import files from the last on in every second worker.

    So each of two workers compiles half of the files, which takes 18 s for all in a fresh clone,
    and reads what the other has compiled.
    """
    report = yield
    if isinstance(collector, pytest.Dir) and os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of THINNED and of OF_EACH_KIND slow. Run the longest files first.

    pytest-xdist hands files to its workers in this order.
    """
    order = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: (order.get(item.path.name, len(order)), item.path))
    seen: Counter[str] = Counter()
    for item in items:
        name = item.originalname if isinstance(item, pytest.Function) else item.name
        if name in OF_EACH_KIND and is_of_another_family(item):
            item.add_marker(pytest.mark.slow)
        if name in THINNED and not item.get_closest_marker("slow"):
            if seen[name] % THINNED[name]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


def smoke_diagonal(*axes: Iterable, also: Iterable[tuple] = ()) -> list:
    """Return all combinations of the axes' values as pytest parameters, most of them slow.

    `make test` runs the diagonal, which has every value of every axis at least once, and the
    combinations in `also`; of a test in THINNED, a part of these. `make test-all` runs all.
    """
    values = [tuple(axis) for axis in axes]
    rows = range(max(map(len, values)))
    quick = {tuple(axis[row % len(axis)] for axis in values) for row in rows} | {*also}
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow)
        for case in itertools.product(*values)
    ]


def hub_keys(config: dict) -> dict:
    """Rename the keys of transformers 5's config.json to those on the Hub (transformers 4)."""
    if config["model_type"] == "nemotron_h":  # no RoPE
        letters = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
        pattern = "".join(letters[kind] for kind in config["layers_block_type"])
        kept = {key: config[key] for key in config.keys() - {"layers_block_type", "layer_types"}}
        limits = {"time_step_limit": [0.0, float("inf")], "num_hidden_layers": len(pattern)}
        return kept | limits | {"hybrid_override_pattern": pattern, "rope_theta": 10000}
    if config["model_type"] == "kimi_linear":  # with keys of Moonshot's own code
        kinds, config = config["layer_types"], dict(config)
        nested = {
            "head_dim": config.pop("linear_head_dim"),
            "num_heads": config.pop("linear_num_heads"),
            "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
        }
        for key, kind in (
            ("kda_layers", "linear_attention"),
            ("full_attn_layers", "full_attention"),
        ):
            nested[key] = [n + 1 for n, each in enumerate(kinds) if each == kind]
        kept = config.keys() - {"layer_types", "mlp_layer_types", "dtype"}
        flags = {"mla_use_nope": True, "use_grouped_topk": True, "head_dim": 72}
        flags |= {"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
        rope = {"rope_scaling": None, "rope_theta": 1e4}
        own = {
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "linear_attn_config": nested,
        }
        return {key: config[key] for key in kept} | flags | rope | own
    config, rope, model_type = dict(config), dict(config["rope_parameters"]), config["model_type"]
    if model_type == "gemma4_text":
        first, *_ = config.pop("per_layer_config").values()
        heads = {"num_global_key_value_heads": first["num_key_value_heads"]}
        return config | heads | {"global_head_dim": first["head_dim"]}
    if model_type == "laguna":  # with keys of poolside's own code
        dense = {"mlp_only_layers": [0], "decoder_sparse_step": 1, "norm_topk_prob": True}
        rope["original_max_position_embeddings"] = 32
        gates = {"gating": "per-head", "gating_types": ["per_head"] * 3}
        return config | dense | gates | {"rope_parameters": rope}
    if model_type == "mellum":
        counts = {"num_experts": config.pop("num_local_experts")}
        return config | counts | {"use_sliding_window": True, "max_window_layers": 0}
    del config["rope_parameters"]
    config |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    kind = rope.pop("rope_type")
    type_key = "rope_type"
    if kind == "longrope" or model_type.startswith("deepseek"):
        type_key = "type"
    rope = rope | {type_key: kind} if kind != "default" else None
    config |= {"rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    even_head_dim = config["hidden_size"] // config["num_attention_heads"]
    if model_type == "mixtral" and config["head_dim"] == even_head_dim:
        config["head_dim"] = None
    if model_type == "qwen3_moe" and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    return config


# Names of weights that are factors: norms, and Gemma 4's of routers.
FACTORS = "norm.weight", "norm_1.weight", "norm_2.weight", "router.scale", "per_expert_scale"


def randomize(peer: "transformers.PreTrainedModel") -> None:
    """Fill the weights with random numbers large enough that every part of the model matters."""
    for module in peer.modules():
        if hasattr(module, "limit"):  # swiglu_limit; older transformers always use 7
            module.limit = peer.config.swiglu_limit
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            # A norm's weight begins at 1, or at 0 where transformers adds 1 to it.
            mean = parameter.mean() if name.endswith(FACTORS) else 0.0
            std = 0.2 if parameter.dim() > 1 else 0.1
            # Gated DeltaNet decays slowly, so that the state has more than the newest tokens; and
            # values are large, since the norm after it would scale up the rounding of small ones.
            mean = -3.0 if name.endswith("A_log") else mean
            std = 0.5 if name.endswith("conv1d.weight") else std
            parameter.copy_(mean + torch.randn_like(parameter) * std)
        for name, buffer in peer.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
            if name.endswith("layer_scalar"):
                buffer.normal_(0.7, 0.1)


@pytest.fixture(scope="session")
def make_family(tmp_path_factory):
    """Map a family's name and its config's layout ("current" or "hub") to a cached Family.

    changes: fields of the config that differ.
    """
    made = {}

    def make(name: str, layout: str = "current", **changes: int) -> Family:
        key = name, layout, *sorted(changes.items())
        if key not in made:
            torch.manual_seed(0)
            peer = FAMILIES[name]()
            if changes:
                config = peer.config
                for field, value in changes.items():
                    setattr(config, field, value)
                peer = type(peer)(config)
            randomize(peer.eval())
            hf_directory = tmp_path_factory.mktemp(f"{name}-{layout}")
            peer.save_pretrained(hf_directory, max_shard_size="200KB")
            if layout == "hub":
                config_file = hf_directory / "config.json"
                config_file.write_text(json.dumps(hub_keys(json.loads(config_file.read_text()))))
            directory = convert(hf_directory, dtype="fp32", progress=False)
            made[key] = Family(name, peer, hf_directory, directory)
        return made[key]

    return make


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, make_family) -> Family:
    return make_family(request.param)


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> Path:
    """Return the embedded model, converted to bf16."""
    output = tmp_path_factory.mktemp("tiny-moe") / "model_bf16"
    return convert(EMBEDDED, output, progress=False)


@pytest.fixture(scope="session")
def shallow_directory(directory, tmp_path_factory) -> Path:
    """Return the embedded model's first layer: for answers that a test scripts."""
    source = Checkpoint(directory)
    target = tmp_path_factory.mktemp("shallow") / "model_bf16"
    with Writer(target, source.args | {"n_layer": 1}, source.format) as writer:
        for name in ("layer_00.safetensors", "rest.safetensors"):
            writer.write(name, load_file(directory / name))
        for name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json"):
            writer.copy(directory / name)
    return target


@pytest.fixture(scope="session")
def hybrid_directory(tmp_path_factory) -> Path:
    """Return the embedded hybrid model, converted to bf16."""
    output = tmp_path_factory.mktemp("tiny-hybrid") / "model_bf16"
    return convert(HYBRID_CHECKPOINT, output, progress=False)


@pytest.fixture(scope="session")
def tokenizer(directory):
    """Return the embedded model's tokenizer."""
    return load_tokenizer(directory)


@pytest.fixture
def no_compiler(monkeypatch):
    """Sessions take their compiled paths (tensor positions, static shapes, warm-up), uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr("ops.inductor.configure_inductor", lambda: None)


@pytest.fixture(scope="module")
def few_threads():
    """Run on one thread: for tests of many small tensors, which more threads slow down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def any_text(**sizes: int) -> st.SearchStrategy[str]:
    """Draw any text in UTF-8; for `st.text()` Hypothesis tries to encode each character: 2 s."""
    return st.text(st.characters(exclude_categories=["Cs"]), **sizes)


def any_json(*keys: str) -> st.SearchStrategy:
    """Draw any JSON value; its objects have these keys, or others."""
    names = st.sampled_from(keys) | any_text(max_size=3)
    plain = st.none() | st.booleans() | st.integers() | st.floats()
    return st.recursive(
        plain | st.text(string.printable + "\ud800é", max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner),
        max_leaves=5,
    )


FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
}
FP8_SIZES = dict(
    vocab_size=160,
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    intermediate_size=384,
    mlp_only_layers=[1],
    norm_topk_prob=True,
    max_position_embeddings=256,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [out, in] to e4m3 codes of that shape and an fp32 scale for each 128 x 128 block."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def save_in_fp8(model: "transformers.PreTrainedModel", directory: Path) -> Path:
    """Save a model with random weights, its projections in FP8 as published."""
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.data = mean + torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.2)
    model.bfloat16().save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(tensors[name].float())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": FP8}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def fp8_directory(tmp_path_factory) -> Path:
    """Return a small Qwen3-MoE in FP8 as Qwen publishes it."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**FP8_SIZES)
    return save_in_fp8(
        transformers.Qwen3MoeForCausalLM(config), tmp_path_factory.mktemp("qwen3-fp8")
    )


@pytest.fixture
def build_parser():
    """Map a command's path to its parser."""

    def build(script: str) -> Parser:
        spec = importlib.util.spec_from_file_location(f"command_{Path(script).stem}", ROOT / script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        parser = module.build_parser()
        parser.prog = Path(script).name
        return parser

    return build


@pytest.fixture
def hub(monkeypatch):
    """A local Hub, for this process's client and for scripts started by `run_script`."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()
    thread.join()
