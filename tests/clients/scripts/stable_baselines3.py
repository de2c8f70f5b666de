"""Stable-Baselines3: PPO on CartPole with a converted policy. What falls is the negative length of episodes."""

from pathlib import Path

from tests.clients.watch import Watch

NEEDS = ("gymnasium",)
RECIPES = ("rowwise", "delayed")
REMARK = "Sizes that are not multiples of 16 (observations, actions) are padded. Ratios: [RL](../guides/rl.md#ratios)."


def ppo(watch: Watch, folder: Path) -> None:
    from stable_baselines3 import PPO

    options = {"n_steps": 256, "batch_size": 64, "n_epochs": 8, "learning_rate": 3e-3, "seed": 0, "device": "cpu"}
    model = PPO("MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [32, 32]}, **options)
    watch.convert(model.policy, pad=True)
    for _ in range(4):
        model.learn(512, reset_num_timesteps=False)
        lengths = [episode["l"] for episode in model.ep_info_buffer]
        watch.losses.append(-sum(lengths[-10:]) / 10)


RUNS = {"`PPO`": ppo}
