"""The papers behind the options of this library, as BibTeX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv; `author` as BibTeX wants it."""

    key: str
    title: str
    author: str
    year: int
    arxiv: str

    @property
    def link(self) -> str:
        """The paper as a Markdown link."""
        return f"[{self.title}](https://huggingface.co/papers/{self.arxiv})"

    @property
    def bibtex(self) -> str:
        """The entry that cites the paper."""
        fields = {
            "title": f"{{{self.title}}}",
            "author": self.author,
            "year": str(self.year),
            "eprint": self.arxiv,
            "archivePrefix": "arXiv",
        }
        lines = [f"    {name:<13} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@misc{{{self.key},", *lines, "}"])


DAPO = Paper(
    "yu2025dapo",
    "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    "Yu, Qiying and Zhang, Zheng and Zhu, Ruofei and Yuan, Yufeng and others",
    2025,
    "2503.14476",
)
MDI = Paper(
    "wu2025language",
    "When Language Overrules: Revealing Text Dominance in Multimodal Large Language Models",
    "Wu, Huyu and Tang, Meng and Zheng, Xinhan and Jiang, Haiyun",
    2025,
    "2508.10552",
)
VPPO = Paper(
    "huang2025spotlight",
    "Spotlight on Token Perception for Multimodal Reinforcement Learning",
    "Huang, Siyuan and Qu, Xiaoye and Li, Yafu and Luo, Yun and He, Zefeng and Liu, Daizong and Cheng, Yu",
    2025,
    "2510.09285",
)
PAPO = Paper(
    "wang2025perception",
    "Perception-Aware Policy Optimization for Multimodal Reasoning",
    "Wang, Zhenhailong and Guo, Xuehang and Stoica, Sofia and Xu, Haiyang and others",
    2025,
    "2507.06448",
)
NOISY_ROLLOUT = Paper(
    "liu2025noisyrollout",
    "NoisyRollout: Reinforcing Visual Reasoning with Data Augmentation",
    "Liu, Xiangyan and Ni, Jinjie and Wu, Zijian and Du, Chao and Dou, Longxu and Wang, Haonan and others",
    2025,
    "2504.13055",
)
VISION_SR1 = Paper(
    "li2025self",
    "Self-Rewarding Vision-Language Model via Reasoning Decomposition",
    "Li, Zongxia and Yu, Wenhao and Huang, Chengsong and Liu, Rui and Liang, Zhenwen and others",
    2025,
    "2508.19652",
)
HIGH_ENTROPY = Paper(
    "wang2025beyond",
    "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for LLM Reasoning",
    "Wang, Shenzhi and Yu, Le and Gao, Chang and Zheng, Chujie and others",
    2025,
    "2506.01939",
)
PRIME = Paper(
    "cui2025process",
    "Process Reinforcement through Implicit Rewards",
    "Cui, Ganqu and Yuan, Lifan and Wang, Zefan and Wang, Hanbin and others",
    2025,
    "2502.01456",
)
ESTIMATORS = {
    "rloo": Paper(
        "ahmadian2024back",
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
        "Ahmadian, Arash and Cremer, Chris and Gall{\\'e}, Matthias and Fadaee, Marzieh and others",
        2024,
        "2402.14740",
    ),
    "remax": Paper(
        "li2023remax",
        "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
        "Li, Ziniu and Xu, Tian and Zhang, Yushun and Lin, Zhihang and others",
        2023,
        "2310.10505",
    ),
    "reinforce_plus_plus": Paper(
        "hu2025reinforce",
        "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
        "Hu, Jian and Liu, Jason Klein and others",
        2025,
        "2501.03262",
    ),
    "gae": Paper(
        "schulman2015high",
        "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
        "Schulman, John and Moritz, Philipp and Levine, Sergey and Jordan, Michael and Abbeel, Pieter",
        2015,
        "1506.02438",
    ),
    "grpo_passk": Paper(
        "tang2025optimizing",
        "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning",
        "Tang, Yunhao and Zheng, Kunhao and Synnaeve, Gabriel and Munos, R{\\'e}mi",
        2025,
        "2503.19595",
    ),
}
PAPERS = {  # option -> where what it switches on comes from
    "token_weights": MDI,
    **dict.fromkeys(("enable_perception_filtering", "enable_trajectory_reweighting", "use_entropy_penalty"), VPPO),
    **dict.fromkeys(("perception_loss_weight", "der_loss_weight1", "der_loss_weight2"), PAPO),
    "noisy_generations": NOISY_ROLLOUT,
    "enable_entropy_filtering": HIGH_ENTROPY,
    "dynamic_sampling": DAPO,
    "online_filtering": PRIME,
}
REWARDS = {  # reward -> where it comes from
    **dict.fromkeys(("vgr_reward", "vgr_hard_negative_reward", "mdi_reward"), MDI),
    "blind_accuracy_reward": VISION_SR1,
}
TAG_OF = {MDI: "vision-gain-ratio", VPPO: "vppo", PAPO: "papo"}
