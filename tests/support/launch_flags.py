"""Flags of public launch scripts of Megatron-LM (github.com/NVIDIA/Megatron-LM, 2026), their variables at the values that the
scripts give: facts only, names and values of flags."""

SCRIPTS: dict[str, tuple[int, str]] = {
'GPT-3 175B (Megatron-LM examples/gpt3/train_gpt3_175b_distributed.sh)': (1024, """--num-layers 96 --hidden-size 12288
--num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --attention-backend auto
--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000
--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5
--lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path d --vocab-file v --merge-file m
--split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save c --load c --eval-iters 10
--tensorboard-dir t"""),
'Llama-3 8B FP8 (Megatron-LM examples/llama/train_llama3_8b_h100_fp8.sh)': (8, """--use-mcore-models --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
--kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
--disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
--grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path c --tiktoken-pattern v2
--split 99,1,0 --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
--profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save s
--load s --tensorboard-dir t"""),
'Mixtral 8x7B (Megatron-LM examples/mixtral/train_mixtral_8x7b_distributed.sh)': (8, """--use-mcore-models
--disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096
--ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0
--normalization RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
--group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000
--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
--tokenizer-type Llama2Tokenizer --tokenizer-model m --mock-data --split 99990,8,2 --micro-batch-size 1
--global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5
--weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
--use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000 --eval-interval 1000
--eval-iters 10 --save c --load c --tensorboard-dir t --no-load-optim --no-load-rng"""),
'DeepSeek-V3 (Megatron-LM tests/functional_tests/.../deepseekv3_proxy_flex_tp1pp4emp16)': (256, """
--distributed-timeout-minutes 60
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*2|(tt|)*5t|tmL
--expert-model-parallel-size 16 --context-parallel-size 1 --expert-tensor-parallel-size 1 --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --use-mcore-models --sequence-parallel --use-flash-attn
--disable-bias-linear --micro-batch-size 1 --global-batch-size 512 --train-samples 24414062
--exit-duration-in-mins 220 --no-check-for-nan-in-loss-and-grad --cross-entropy-loss-fusion
--cross-entropy-fusion-impl native --manual-gc --manual-gc-interval 10 --transformer-impl transformer_engine
--seq-length 4096 --data-cache-path c --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model m --data-path d
--split 99,1,0 --no-mmap-bin-files --no-create-attention-mask-in-dataloader --num-workers 6 --num-layers 14
--hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --max-position-embeddings 4096
--position-embedding-type rope --rotary-base 10000 --make-vocab-size-divisible-by 3232 --normalization RMSNorm
--norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights --multi-latent-attention --mtp-num-layers 1
--mtp-loss-scaling-factor 0.1 --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1
--qk-layernorm --lr-decay-samples 24413696 --lr-warmup-samples 1536000 --lr-warmup-init 1e-7 --lr 1e-5 --min-lr 1e-6
--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95
--num-experts 64 --moe-layer-freq ([0]*3+[1]*11) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8 --moe-token-dispatcher-type flex
--moe-flex-dispatcher-backend hybridep --moe-router-pre-softmax --moe-grouped-gemm --moe-aux-loss-coeff 1e-4
--moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
--moe-router-dtype fp32 --moe-permute-fusion --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
--eval-iters 32 --eval-interval 200 --auto-detect-ckpt-format --save s --load s --save-interval 250
--save-retain-interval 5000 --dist-ckpt-strictness log_all --init-method-std 0.02 --log-timers-to-tensorboard
--log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard
--log-throughput --log-interval 1 --logging-level 40 --tensorboard-dir t --wandb-project p --wandb-entity adlr
--wandb-exp-name e --wandb-save-dir d --bf16 --enable-experimental --exit-interval 9536"""),
'Qwen3-8B (Megatron-LM examples/post_training/modelopt/conf/qwen/Qwen3-8B.sh)': (8, """--save-interval 100000
--micro-batch-size 1 --bf16 --no-masked-softmax-fusion --disable-bias-linear --untie-embeddings-and-output-weights
--position-embedding-type rope --no-rope-fusion --normalization RMSNorm --swiglu --num-layers 36 --hidden-size 4096
--ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
--qk-layernorm --seq-length 4096 --max-position-embeddings 40960 --tokenizer-type HuggingFaceTokenizer
--make-vocab-size-divisible-by 1187 --use-mcore-models --rotary-percent 1.0 --rotary-base 1000000
--no-bias-swiglu-fusion"""),
}
