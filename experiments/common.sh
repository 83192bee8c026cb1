# Settings that all experiments share. Every script sources this file; flags given to a script override all of them.
#
#   DATA               train=a.parquet,test=b.parquet; or give --dataset_name, --dataset_path or --data_files
#                      (default: lujunxi57/DDM from the hub; without the splits test and validation, a tenth of its
#                      rows is held out)
#   ACCELERATE_CONFIG  one of accelerate_configs/ (default zero2)
#   NUM_PROCESSES      GPUs, of all machines together (default: those there are)
#   NUM_MACHINES       with MACHINE_RANK (0, 1, …) and MAIN_IP (of the machine with rank 0): start the script on each machine
#   TINY=1             the embedded model on one CPU for a few steps, in a new folder below TINY_FOLDER (runs/tiny)

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
experiment="$(basename "$0" .sh)"

TRAIN="$repo/examples/train_grpo_vlm.py"
LAUNCH=(--config_file "$repo/accelerate_configs/${ACCELERATE_CONFIG:-zero2}.yaml")
if [[ -z "${TINY:-}" ]] && grep -q "^distributed_type: DEEPSPEED" "${LAUNCH[1]}" &&
    ! python -c 'import importlib.util as of, sys; sys.exit(of.find_spec("deepspeed") is None)'; then
    echo "$experiment: ${LAUNCH[1]} asks for DeepSpeed, which is not installed: pip install \"vgr_trl[deepspeed]\", or" \
        "take another configuration, for instance ACCELERATE_CONFIG=multi_gpu." >&2
    exit 1
fi
if [[ -n "${NUM_MACHINES:-}" ]]; then
    NUM_PROCESSES="${NUM_PROCESSES:-$((NUM_MACHINES * $(nvidia-smi -L | wc -l)))}"
fi
if [[ -n "${NUM_PROCESSES:-}" ]]; then
    LAUNCH+=(--num_processes "$NUM_PROCESSES")
fi
if [[ -n "${NUM_MACHINES:-}" ]]; then
    LAUNCH+=(--num_machines "$NUM_MACHINES" --machine_rank "${MACHINE_RANK:?}" --main_process_ip "${MAIN_IP:?}")
    LAUNCH+=(--main_process_port "${MAIN_PORT:-29500}")
fi

COMMON=(
    --model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct
    --dtype bfloat16
    --output_dir "runs/$experiment"
    --max_prompt_length 1024
    --max_short_side 1024
    --max_completion_length 512
    --soft_punish_cache 50
    --num_generations 8
    --eval_num_generations 4
    --learning_rate 1e-5
    --lr_scheduler_type cosine
    --warmup_ratio 0.05
    --max_grad_norm 1.0
    --logging_steps 1
    --eval_strategy steps
    --eval_steps 10
    --replay_buffer_size 64
    --replay_var_epsilon 1e-6
)
other_data=" --(dataset_(name|path)|data_files)[= ]"
if [[ ! " $* " =~ $other_data && -n "${DATA:-}" ]]; then
    COMMON+=(--data_files "$DATA")
fi

# Behind the experiment's own flags, so that these hold instead.
OVERRIDES=()
if [[ -n "${TINY:-}" ]]; then
    tiny="${TINY_FOLDER:-runs/tiny}"
    if [[ ! -d "$tiny/embedded" ]]; then
        python -m vgr_trl.demo.write_folder "$tiny/embedded"
    fi
    LAUNCH=(--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)
    OVERRIDES=(
        --model_name_or_path "$tiny/embedded/model"
        --system_prompt_file "$tiny/embedded/no_system_prompt.txt"
        --output_dir "$tiny/$experiment-$(date +%Y%m%d-%H%M%S)-$$"
        --use_cpu true
        --bf16 false
        --dtype float32
        --gradient_checkpointing false
        --per_device_train_batch_size 32
        --per_device_eval_batch_size 32
        --max_completion_length 16
        --soft_punish_cache 4
        --learning_rate 1e-3
        --max_steps 8
        --eval_steps 4
        --save_strategy no
        --report_to none
    )
    if [[ ! " $* " =~ $other_data ]]; then
        OVERRIDES+=(--data_files "train=$tiny/embedded/train.parquet,test=$tiny/embedded/test.parquet")
    fi
fi
OVERRIDES+=("$@")
