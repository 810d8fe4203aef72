"""Names of config fields that transformers knows, by `model_type`.

Written by `python tests/helpers/transformers_fields.py`; do not edit.
"""

COMMON = frozenset(
    """
    _attn_implementation _attn_implementation_internal _auto_class _commit_hash
    _configuration_file _experts_implementation _experts_implementation_internal
    _from_auto _from_pipeline _is_quantized _name_or_path _output_attentions
    _post_init_done _rope_type_labels add append architectures attention_chunk_size
    attention_dropout attention_factor attention_scaling attn_implementation
    attribute_map auto_map base_model_pp_plan base_model_tp_plan beta_fast beta_slow
    bos_token_id cache_dir chain_hidden_post_norm chunk_size_feed_forward
    classifier_dropout commit_message compile_config config config_class
    configuration_files create_compatible_mapping decoder default default_rope_type
    default_theta device_map device_mesh disable_mmap disk_offload_folder
    distributed_config dtype dynamic embed_dim eos_token_id experts_implementation
    factor features_only fget first_k_dense_replace force_download from_model_config
    fusion_config generator get get_config_class gguf_file gradient_checkpointing
    head_dim hf_quantizer hidden_dropout hidden_size id2label
    ignore_keys_at_rope_validation ignore_mismatched_sizes init_kwargs init_std
    initializer_factor initializer_range is_causal is_encoder_decoder is_heterogeneous
    is_quantized items keys kv_sharing_modes kwargs label2id layer_types
    local_files_only logits_mup_width_multiplier long_factor max_position_embeddings
    max_seq_len_cached mlp_layer_types model_type mscale mscale_all_dim
    mtp_hidden_states_first mtp_layer_types mtp_mlp_layer_types mtp_per_layer_config
    name_or_path num_attention_heads num_channels num_heads num_hidden_layers
    num_key_value_heads num_labels num_mtp_layers number_of_conv_states optional
    original_inv_freq original_max_position_embeddings original_max_seq_len out_indices
    output_attentions output_hidden_states pad_token_id partial_rotary_factor
    per_layer_config popleft pretrained_model_name_or_path problem_type proxies
    quant_method quantization_config register_buffer replace repo_id return_dict
    return_unused_kwargs revision rms_norm_eps rope_parameters rope_scaling rope_theta
    rope_type sanitize_kernel_mapping sep_token_id sharded_metadata short_factor
    sliding_window sub_configs sub_configs_defaults subfolder text_config text_encoder
    tie_last_hidden_states tie_word_embeddings token token_classification_bias
    torch_dtype transformers_version transformers_weights truncate trust_remote_code
    type unpadded_vocab_size values vocab_size weight_mapping weights_only
    """.split()
)

ROPE_KEYS = frozenset(
    """
    PreTrainedConfig _ _max_seq_len_cached _original_inv_freq _rope_parameters
    _rope_type_labels _validate_ alpha attention_factor attention_mask beta_fast
    beta_slow default dynamic factor full_attention head_dim high_freq_factor image
    input_ids inv_freq layer_type layer_types linear linear_attention llama3
    llama_4_scaling_beta logits_to_keep long_factor long_inv_freq long_mscale longrope
    low_freq_factor max_seq_len_cached mrope_section mscale mscale_all_dim
    next_sequence_length or_mask_function original_inv_freq
    original_max_position_embeddings partial_rotary_factor proportional rope_parameters
    rope_scaling rope_theta rope_type short_factor short_mscale sliding_attention
    token_type_ids truncate type video xielu yarn
    """.split()
)

BY_MODEL_TYPE = {
    "apertus": frozenset(
        """
        attention_bias hidden_act intermediate_size use_cache
        """.split()
    ),
    "arcee": frozenset(
        """
        attention_bias hidden_act intermediate_size mlp_bias use_cache
        """.split()
    ),
    "bloom": frozenset(
        """
        apply_residual_connection_post_layernorm layer_norm_epsilon n_embed n_head
        n_layer pretraining_tp slow_but_exact use_cache
        """.split()
    ),
    "cohere": frozenset(
        """
        attention_bias hidden_act intermediate_size layer_norm_eps logit_scale use_cache
        use_qk_norm
        """.split()
    ),
    "cohere2": frozenset(
        """
        attention_bias hidden_act intermediate_size layer_norm_eps logit_scale
        sliding_window_pattern use_cache
        """.split()
    ),
    "deepseek_v2": frozenset(
        """
        attention_bias hidden_act intermediate_size kv_lora_rank mlp_bias
        moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob
        num_experts num_experts_per_tok output_router_logits pretraining_tp q_lora_rank
        qk_head_dim qk_nope_head_dim qk_rope_head_dim routed_scaling_factor topk_group
        topk_method use_cache v_head_dim
        """.split()
    ),
    "deepseek_v3": frozenset(
        """
        attention_bias hidden_act intermediate_size kv_lora_rank moe_intermediate_size
        n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
        num_local_experts num_nextn_predict_layers output_router_logits pretraining_tp
        q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rope_interleave
        routed_scaling_factor topk_group use_cache v_head_dim
        """.split()
    ),
    "dots1": frozenset(
        """
        attention_bias hidden_act intermediate_size max_window_layers
        moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob
        num_experts_per_tok num_local_experts output_router_logits routed_scaling_factor
        sliding_attention topk_group use_cache
        """.split()
    ),
    "ernie4_5": frozenset(
        """
        hidden_act intermediate_size use_bias use_cache
        """.split()
    ),
    "ernie4_5_moe": frozenset(
        """
        hidden_act intermediate_size moe_intermediate_size moe_k moe_layer_end_index
        moe_layer_interval moe_layer_start_index moe_norm_min moe_num_experts
        moe_num_shared_experts num_experts num_experts_per_tok output_router_logits
        router_aux_loss_coef use_bias use_cache
        """.split()
    ),
    "exaone4": frozenset(
        """
        hidden_act intermediate_size sliding_attention sliding_window_pattern use_cache
        """.split()
    ),
    "falcon": frozenset(
        """
        activation alibi bias ffn_hidden_size layer_norm_epsilon multi_query n_embed
        new_decoder_architecture num_kv_heads num_ln_in_parallel_attn parallel_attn
        use_bettertransformer use_cache
        """.split()
    ),
    "falcon_h1": frozenset(
        """
        attention_bias attention_in_multiplier attention_out_multiplier
        embedding_multiplier hidden_act intermediate_size key_multiplier
        layers_block_type lm_head_multiplier mamba_chunk_size mamba_conv_bias
        mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_expand mamba_n_groups
        mamba_n_heads mamba_norm_before_gate mamba_proj_bias mamba_rms_norm mlp_bias
        mlp_multipliers num_logits_to_keep projectors_bias ssm_in_multiplier
        ssm_multipliers ssm_out_multiplier time_step_limit use_cache
        """.split()
    ),
    "gemma": frozenset(
        """
        RMSNorm attention_bias hidden_act intermediate_size use_bidirectional_attention
        use_cache
        """.split()
    ),
    "gemma2": frozenset(
        """
        RMSNorm attention_bias attn_logit_softcapping final_logit_softcapping
        hidden_activation intermediate_size query_pre_attn_scalar
        use_bidirectional_attention use_cache
        """.split()
    ),
    "gemma3_text": frozenset(
        """
        RMSNorm _sliding_window_pattern attention_bias attn_logit_softcapping
        final_logit_softcapping full_attention hidden_activation image image_size
        image_token_id intermediate_size is_sliding layer_norm_eps mm_tokens_per_image
        patch_size query_pre_attn_scalar rope_local_base_freq sliding_attention
        sliding_window_pattern token_type_ids use_bidirectional_attention use_cache
        vision_config
        """.split()
    ),
    "glm": frozenset(
        """
        attention_bias hidden_act intermediate_size use_cache
        """.split()
    ),
    "glm4": frozenset(
        """
        attention_bias hidden_act intermediate_size use_cache
        """.split()
    ),
    "glm4_moe": frozenset(
        """
        attention_bias hidden_act intermediate_size moe_intermediate_size n_group
        n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
        num_local_experts num_nextn_predict_layers output_router_logits
        routed_scaling_factor topk_group use_cache use_qk_norm
        """.split()
    ),
    "glm4_moe_lite": frozenset(
        """
        attention_bias hidden_act intermediate_size kv_lora_rank moe_intermediate_size
        n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
        num_local_experts output_router_logits pretraining_tp q_lora_rank qk_head_dim
        qk_nope_head_dim qk_rope_head_dim rope_interleave routed_scaling_factor
        topk_group use_cache v_head_dim
        """.split()
    ),
    "gpt2": frozenset(
        """
        activation_function add_cross_attention attn_pdrop crossattention embd_pdrop
        last layer_norm_epsilon n_embd n_head n_inner n_layer n_positions q_attn
        reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx
        scale_attn_weights summary_activation summary_first_dropout summary_last_dropout
        summary_proj_to_labels summary_type summary_use_proj use_cache
        """.split()
    ),
    "gpt_bigcode": frozenset(
        """
        activation_function add_cross_attention attention_softmax_in_fp32 attn_pdrop
        crossattention embd_pdrop layer_norm_epsilon multi_query n_embd n_head n_inner
        n_layer n_positions q_attn resid_pdrop scale_attention_softmax_in_fp32
        scale_attn_weights use_cache
        """.split()
    ),
    "gpt_neox": frozenset(
        """
        attention_bias hidden_act intermediate_size is_decoder layer_norm_eps
        rotary_emb_base rotary_pct use_cache use_parallel_residual
        """.split()
    ),
    "gpt_oss": frozenset(
        """
        attention_bias hidden_act intermediate_size num_experts num_experts_per_tok
        num_local_experts output_router_logits router_aux_loss_coef swiglu_alpha
        swiglu_limit use_cache
        """.split()
    ),
    "gptj": frozenset(
        """
        activation_function attn_pdrop embd_pdrop layer_norm_epsilon n_embd n_head
        n_inner n_layer n_positions resid_pdrop rotary_dim use_cache
        """.split()
    ),
    "granite": frozenset(
        """
        attention_bias attention_multiplier embedding_multiplier hidden_act
        intermediate_size logits_scaling mlp_bias residual_multiplier use_cache
        """.split()
    ),
    "granitemoe": frozenset(
        """
        attention_bias attention_multiplier embedding_multiplier hidden_act
        intermediate_size logits_scaling num_experts_per_tok num_local_experts
        output_router_logits residual_multiplier router_aux_loss_coef use_cache
        """.split()
    ),
    "granitemoehybrid": frozenset(
        """
        attention_bias attention_multiplier embedding_multiplier hidden_act
        intermediate_size layers_block_type logits_scaling mamba_chunk_size
        mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand
        mamba_n_groups mamba_n_heads mamba_proj_bias num_experts_per_tok
        num_local_experts output_router_logits position_embedding_type
        residual_multiplier router_aux_loss_coef shared_intermediate_size
        time_step_limit use_cache
        """.split()
    ),
    "granitemoeshared": frozenset(
        """
        attention_bias attention_multiplier embedding_multiplier hidden_act
        intermediate_size logits_scaling num_experts_per_tok num_local_experts
        output_router_logits residual_multiplier router_aux_loss_coef
        shared_intermediate_size use_cache
        """.split()
    ),
    "hunyuan_v1_dense": frozenset(
        """
        alpha attention_bias eod_token_id hidden_act intermediate_size pretraining_tp
        use_cache
        """.split()
    ),
    "hunyuan_v1_moe": frozenset(
        """
        alpha attention_bias eod_token_id hidden_act intermediate_size moe_topk
        num_experts num_experts_per_tok num_local_experts output_router_logits
        pretraining_tp use_cache
        """.split()
    ),
    "internlm3": frozenset(
        """
        attention_bias bias hidden_act intermediate_size mlp_bias qkv_bias use_cache
        """.split()
    ),
    "lfm2": frozenset(
        """
        block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of
        conv_L_cache conv_bias full_attn_idxs intermediate_size norm_eps tie_embedding
        use_cache
        """.split()
    ),
    "llama": frozenset(
        """
        attention_bias hidden_act intermediate_size mlp_bias pretraining_tp use_cache
        """.split()
    ),
    "llama4_text": frozenset(
        """
        attention_bias attn_scale attn_temperature_tuning floor_scale hidden_act image
        image_size image_token_id interleave_moe_layer_step intermediate_size
        intermediate_size_mlp moe_layers no_rope_layer_interval no_rope_layers
        num_experts_per_tok num_local_experts output_router_logits patch_size
        pixel_shuffle_ratio projector_dropout projector_input_dim projector_output_dim
        qk_norm router_aux_loss_coef router_jitter_noise use_cache use_qk_norm
        vision_config vision_output_dim
        """.split()
    ),
    "mamba2": frozenset(
        """
        chunk_size conv_kernel expand hidden_act layer_norm_epsilon n_groups
        rescale_prenorm_residual residual_in_fp32 state_size time_step_floor
        time_step_limit time_step_max time_step_min time_step_rank use_bias use_cache
        use_conv_bias
        """.split()
    ),
    "minimax_m2": frozenset(
        """
        hidden_act intermediate_size num_experts num_experts_per_tok num_local_experts
        output_router_logits rotary_dim router_aux_loss_coef router_jitter_noise
        use_cache
        """.split()
    ),
    "ministral3": frozenset(
        """
        hidden_act intermediate_size llama_4_scaling_beta use_cache
        """.split()
    ),
    "mistral": frozenset(
        """
        hidden_act intermediate_size use_cache
        """.split()
    ),
    "mixtral": frozenset(
        """
        hidden_act intermediate_size num_experts num_experts_per_tok num_local_experts
        output_router_logits router_aux_loss_coef router_jitter_noise use_cache
        """.split()
    ),
    "mpt": frozenset(
        """
        attn_config attn_pdrop clip_qkv d_model emb_pdrop embedding_fraction
        expansion_ratio init_device layer_norm_epsilon learned_pos_emb logit_scale
        max_seq_len n_heads n_layers no_bias norm_type resid_pdrop softmax_scale
        use_cache
        """.split()
    ),
    "nemotron": frozenset(
        """
        attention_bias hidden_act intermediate_size mlp_bias norm_eps use_cache
        """.split()
    ),
    "nemotron_h": frozenset(
        """
        _is_hf_initialized _list_to_pattern _pattern_to_list attention_bias chunk_size
        conv_kernel expand hybrid_override_pattern intermediate_size layer_norm_epsilon
        layers_block_type mamba_chunk_size mamba_conv_bias mamba_d_conv
        mamba_dt_init_floor mamba_dt_limit mamba_dt_max mamba_dt_min mamba_expand
        mamba_head_dim mamba_hidden_act mamba_n_groups mamba_num_heads mamba_proj_bias
        mamba_ssm_cache_dtype mlp_bias mlp_hidden_act moe_intermediate_size
        moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_overlap
        mtp_hybrid_override_pattern mtp_layers_block_type n_group n_groups
        n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
        num_local_experts num_logits_to_keep num_nextn_predict_layers
        output_router_logits rescale_prenorm_residual residual_in_fp32
        routed_scaling_factor ssm_state_size time_step_floor time_step_limit
        time_step_max time_step_min topk_group use_bias use_cache use_conv_bias
        use_mamba_kernels
        """.split()
    ),
    "olmo": frozenset(
        """
        attention_bias clip_qkv hidden_act intermediate_size use_cache
        """.split()
    ),
    "olmo2": frozenset(
        """
        attention_bias hidden_act intermediate_size use_cache
        """.split()
    ),
    "olmo3": frozenset(
        """
        attention_bias full_attention hidden_act intermediate_size sliding_attention
        use_cache
        """.split()
    ),
    "olmoe": frozenset(
        """
        attention_bias clip_qkv hidden_act intermediate_size norm_topk_prob num_experts
        num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef
        use_cache
        """.split()
    ),
    "opt": frozenset(
        """
        _remove_final_layer_norm activation_function do_layer_norm_before dropout
        enable_bias ffn_dim layer_norm_elementwise_affine layerdrop use_cache
        word_embed_proj_dim
        """.split()
    ),
    "phi": frozenset(
        """
        embd_pdrop hidden_act intermediate_size layer_norm_eps qk_layernorm resid_pdrop
        use_cache
        """.split()
    ),
    "phi3": frozenset(
        """
        embd_pdrop hidden_act intermediate_size resid_pdrop use_cache
        """.split()
    ),
    "phimoe": frozenset(
        """
        attention_bias hidden_act input_jitter_noise intermediate_size lm_head_bias
        long_mscale num_experts_per_tok num_local_experts output_router_logits
        router_aux_loss_coef router_jitter_noise short_mscale use_cache
        """.split()
    ),
    "qwen2": frozenset(
        """
        hidden_act intermediate_size max_window_layers sliding_attention use_cache
        use_sliding_window
        """.split()
    ),
    "qwen2_moe": frozenset(
        """
        decoder_sparse_step hidden_act intermediate_size max_window_layers
        mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
        num_experts_per_tok output_router_logits qkv_bias router_aux_loss_coef
        shared_expert_intermediate_size use_cache use_sliding_window
        """.split()
    ),
    "qwen3": frozenset(
        """
        attention_bias hidden_act intermediate_size max_window_layers sliding_attention
        use_cache use_sliding_window
        """.split()
    ),
    "qwen3_5_moe_text": frozenset(
        """
        attention_bias cu_seq_lens_q depth full_attention_interval hidden_act image
        image_grid_thw image_token_id in_channels input_ids intermediate_size
        linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
        linear_num_value_heads linear_value_head_dim mm_token_type_ids
        moe_intermediate_size mrope_section num_experts num_experts_per_tok
        num_position_embeddings out_hidden_size output_router_logits past_key_values
        patch_size router_aux_loss_coef shared_expert_intermediate_size
        spatial_merge_size temporal_patch_size use_cache video video_grid_thw
        video_token_id vision_config
        """.split()
    ),
    "qwen3_5_text": frozenset(
        """
        attention_bias cu_seq_lens_q depth full_attention_interval hidden_act image
        image_grid_thw image_token_id in_channels input_ids intermediate_size
        linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
        linear_num_value_heads linear_value_head_dim mm_token_type_ids mrope_section
        num_position_embeddings out_hidden_size past_key_values patch_size
        spatial_merge_size temporal_patch_size use_cache video video_grid_thw
        video_token_id vision_config
        """.split()
    ),
    "qwen3_moe": frozenset(
        """
        attention_bias decoder_sparse_step hidden_act intermediate_size mlp_only_layers
        moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
        num_local_experts output_router_logits router_aux_loss_coef use_cache
        use_sliding_window
        """.split()
    ),
    "qwen3_next": frozenset(
        """
        attention_bias cu_seq_lens_q decoder_sparse_step full_attention_interval
        hidden_act intermediate_size linear_conv_kernel_dim linear_key_head_dim
        linear_num_key_heads linear_num_value_heads linear_value_head_dim
        mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
        num_experts_per_tok output_router_logits router_aux_loss_coef
        shared_expert_intermediate_size use_cache
        """.split()
    ),
    "seed_oss": frozenset(
        """
        attention_bias attention_out_bias hidden_act intermediate_size mlp_bias
        pretraining_tp residual_dropout use_cache
        """.split()
    ),
    "smollm3": frozenset(
        """
        attention_bias hidden_act intermediate_size mlp_bias no_rope_layer_interval
        no_rope_layers sliding_attention use_cache use_sliding_window
        """.split()
    ),
    "stablelm": frozenset(
        """
        hidden_act intermediate_size layer_norm_eps qk_layernorm use_cache
        use_parallel_residual use_qkv_bias
        """.split()
    ),
    "starcoder2": frozenset(
        """
        embedding_dropout hidden_act intermediate_size norm_epsilon residual_dropout
        use_bias use_cache
        """.split()
    ),
}
