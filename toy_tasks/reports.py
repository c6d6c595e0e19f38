"""The commands, which measure and print. `train`: the job and its table. `eval`: success. `show`: one episode, token by
token. `rehearse`: imagine, remember, act once; with `--compare`, what N private rehearsals are worth and cost: every
way to spend them (an arm), by a run's base and its trained policy, on the same held-out tasks. `bench`: speed."""
import collections, functools, itertools, json, math, statistics, sys, time
from dataclasses import replace
from pathlib import Path
import torch, torch.utils.benchmark
from envace_mini import (ACT, CONTEXT, EXECUTE, LEDGER, REHEARSE, ROLE_NAMES, Config, Episode, by_domain, compact,
                         compare_responses, fidelity, fitting, grade, load_policy, load_tasks, mean, open_policy,
                         peak_memory, pick_device, plan, private_rehearsal, remember, require, role_advantages, rollout,
                         run_tasks, seeded, self_judgement, train, training_samples, update, warm_start, write_json)
from toy_tasks.own_tasks import reading

COUNTS = (1, 2, 4, 8)                                   # rehearsals

def compare(cfg):
    """Run all arms with cfg.eval_samples seeds, print the table, and write compare.json into the run folder."""
    path, device = Path(cfg.out), pick_device(cfg)
    require((path / "model").is_dir(), f"--out {path}: no finished run, of which to compare base and trained policy")
    with reading(path / "config.json"):
        run = Config(**json.loads((path / "config.json").read_text(encoding="utf-8")))
    cfg = replace(run, **{name: getattr(cfg, name) for name in (        # all else is as it was in the run
        "out", "seed", "device", "threads", "eval_samples", "temperature", "split", "memory", "memory_budget")})
    tasks = [task for task in load_tasks(run.tasks, run) if task.world]
    require(any(task.split == cfg.split for task in tasks), f"--compare: no {cfg.split} task of the run has a world")
    base = None if run.model == "tiny" else load_policy(run.model, device, run)
    if run.warm_start or not base:                      # found beside the run, or made again
        base = warm_start([task for task in tasks if task.split == "train"], replace(run, out=cfg.out), device, base)
    policies = {"base": base, "trained": load_policy(str((path / "model").resolve()), device, cfg)}
    held_out = fitting(base, [task for task in tasks if task.split == cfg.split], replace(cfg, responder="world"))
    trials = {name: [one_trial(policy, held_out, replace(cfg, seed=cfg.seed + n), f"{name} {n}")
                     for n in range(cfg.eval_samples)] for name, policy in policies.items()}
    result = {name: {arm: summary([trial[arm] for trial in these]) for arm in these[0]}
              for name, these in trials.items()}
    write_json(path / "compare.json", {"tasks": len(held_out), "split": cfg.split, "seeds": cfg.eval_samples, **result})
    print("\n".join([table(result), *kinds(held_out, cfg.split)]))
    print(f"{len(held_out)} {cfg.split} tasks x {cfg.eval_samples} seeds; +- is the standard deviation over seeds; "
          f"written to {path / 'compare.json'}")

def one_trial(policy, tasks, cfg, label):
    """{arm: {domain or "all": success, "world calls" and "tokens": a task, "true": of the memory}} for one seed."""
    arms = {}
    def note(arm, episodes, pools, kept=()):
        """Success of the episodes that count; the cost of all of them; the share of true responses in the memories."""
        spent = sum(len(row.ids) for e in [*episodes, *(e for pool in pools for e in pool)] for row in e.rows)
        arms[arm] = {"all": mean(e.success for e in episodes), "world calls": mean(len(e.calls) for e in episodes),
                     "tokens": spent / len(tasks), "true": mean(same for _, same in fidelity(sum(kept, []))),
                     **{name: mean(e.success for e in part) for name, part in by_domain(episodes).items()}}
    def execute(jobs, temperature=cfg.temperature):
        return run_tasks(policy, jobs, cfg, "world", temperature, f"{label}: execution")
    note("no rehearsal", execute(tasks), [])
    note("no rehearsal, greedy", execute(tasks, 0.0), [])
    for mode in ("parallel", "sequential"):
        _, _, pools = private_rehearsal(policy, tasks, replace(cfg, mode=mode, rehearsals=max(COUNTS)), label)
        for n in COUNTS:                                # the first n of them are what n rehearsals would have been
            part = [pool[:n] for pool in pools]
            guided, kept = remember(policy, tasks, part, cfg, EXECUTE)
            note(f"{mode} {n}", execute(guided), part, kept)
            for arm, judge in JUDGES.items() if mode == "parallel" else ():     # execute an imagined plan as it is
                note(f"{arm} {n}", [max(pool, key=lambda e: judge(e, pool)) for pool in part], part)
    return arms

JUDGES = {  # which rehearsal is carried out, without looking, in the world
    "majority of": lambda e, pool: collections.Counter(map(plan, pool))[plan(e)],
    "best by self-judgement of": lambda e, pool: self_judgement(e),
    "best by the checks (oracle) of": lambda e, pool: bool(e.success)}

def summary(trials):
    """Mean over seeds of every measure, and the deviation of overall success."""
    values = {key: [trial.get(key) for trial in trials] for key in trials[0]}
    return {**{key: mean(found) if None not in found else None for key, found in values.items()},
            "deviation": statistics.stdev(values["all"]) if len(trials) > 1 and None not in values["all"] else None}

def table(result):
    """The arms as lines: success of base and trained policy, all tasks and by domain, and the costs of the latter."""
    domains = [key for key in result["base"]["no rehearsal"] if key not in (
        "all", "world calls", "tokens", "true", "deviation")]
    show = lambda value, width=5: "-".rjust(width) if value is None else f"{value:{width}.2f}"
    head = "".join(f"{name:>7}" for name in domains)
    lines = [f"{'success in the world':34}  base    +-{head}   trained    +-{head}   calls  tokens  memory true"]
    for arm, trained in result["trained"].items():
        columns = [show(part["all"], 6) + show(part["deviation"], 6) + "".join(show(part[name], 7) for name in domains)
                   for part in (result["base"][arm], trained)]
        costs = f"{show(trained['world calls'], 8)}  {trained['tokens']:6.0f}  {show(trained['true'], 11)}"
        lines.append(f"{arm:34}{columns[0]}    {columns[1]}{costs}")
    return "\n".join(lines)

def command_train(cfg):
    """`train`: the whole job and its table."""
    result = train(cfg)
    print(result_table(result))
    print(f"{result['episodes']} training episodes with {result['world_calls_in_rollouts']} calls to the world; "
          f"{result['seconds']['total']:.0f} s; {result['peak_memory_gib']} GiB; everything is in {cfg.out}")

def result_table(result):
    """A run's result as the table that `train` prints: base, trained, change."""
    show = lambda value, sign="": "     -" if value is None else f"{value:{sign}6.2f}"
    lines = [f"{'held-out tasks':34}  base  trained  change"]
    for name in ("all", *result["trained"]["by_domain"]):
        base, trained = ({"all": part, **part["by_domain"]}[name] for part in (result["base"], result["trained"]))
        for key in ("world_success", "world_success_greedy", "imagined_success", "fidelity", "reality_gap"):
            change = None if None in (base[key], trained[key]) else trained[key] - base[key]
            values = f"{show(base[key])}  {show(trained[key])}   {show(change, '+')}"
            lines.append(f"{name + ': ' + key.replace('_', ' '):34}{values}")
    return "\n".join(lines + result["base"]["report"] + result["trained"]["report"])

def command_rehearse(cfg):
    """`rehearse`: private rehearsals, the memory that they leave, and one committed execution of every task."""
    if cfg.compare:
        return compare(cfg)
    policy, tasks, _ = open_policy(cfg)
    tasks = [task for task in tasks if cfg.task in ("", task.id) for _ in range(cfg.eval_samples)]
    require(tasks, f"--task {cfg.task}: no task of split {cfg.split} has this id")
    before, (guided, kept, pools) = LEDGER["evaluation"], private_rehearsal(policy, tasks, cfg, "rehearse")
    print(f"{cfg.rehearsals} rehearsals ({cfg.mode}, {cfg.memory}) before {len(tasks)} executions; calls to the world "
          f"so far: {LEDGER['evaluation'] - before}{'; a memory:' * bool(guided[0].memory)}{guided[0].memory}")
    executed = run_tasks(policy, [t for t in guided if t.world], cfg, "world", cfg.temperature, "eval")
    if len(executed) < len(tasks):
        print(f"{len(tasks) - len(executed)} tasks have no world: there is nothing to commit to; see the rehearsals")
    for e in executed[:1]:
        print("its execution: " + "; ".join(e.history))
    for what, found in (("rehearsed", sum(pools, [])), ("remembered", sum(kept, [])), ("executed", executed)):
        for name, part in by_domain(found).items():
            done, truth = mean(e.success for e in part), mean(same for _, same in fidelity(part))
            known = "" if truth is None else f"  fidelity {truth:.3f}"
            print(f"{what:10}  {name:10} success {'-' if done is None else f'{done:.3f}'}{known}")
    tried = executed or sum(pools, [])                  # of a task without a world there are rehearsals only
    for line in report(tried, cfg.eval_samples * (1 if executed else max(cfg.rehearsals, 1)), cfg.split):
        print(line)

def pass_at_k(n, correct, k):
    """Unbiased chance that at least one of k samples is right, from n samples of which some are (arXiv 2107.03374)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)

def command_eval(cfg):
    """`eval`: success of a saved policy, mean and by domain, with pass@k and fidelity."""
    policy, tasks, simulator = open_policy(cfg)
    samples = cfg.eval_samples if cfg.temperature else 1
    episodes = run_tasks(policy, tasks, cfg, cfg.responder, cfg.temperature, "eval", samples, simulator)
    print(f"{len(tasks)} {cfg.split} tasks x {samples} episodes, temperature {cfg.temperature}, {cfg.responder}; "
          f"{mean(e.over == 'truncated' for e in episodes):.0%} truncated")
    for name, part in [("all", episodes), *by_domain(episodes).items()]:
        tries = [[e.success for e in part[n:n + samples] if e.scored] for n in range(0, len(part), samples)]
        chances = {k: mean(pass_at_k(len(hits), sum(hits), k) for hits in tries if len(hits) >= k)
                   for k in sorted({1, 2, 4, 8, 16, samples}) if k <= samples}
        passes = [f"pass@{k} {chance:.3f}" for k, chance in chances.items() if chance is not None]
        known = [f"fidelity {mean(same for _, same in pairs):.3f}"] if (pairs := fidelity(part)) else []
        success = mean(e.success for e in part)
        print("  ".join([f"{name:10} success {'-' if success is None else f'{success:.3f}'}", *passes, *known]))
    for line in report(episodes, samples, cfg.split):
        print(line)

def command_show(cfg):
    """`show`: one episode token by token, the world's own answers, checks, and its group's advantages."""
    policy, tasks, simulator = open_policy(cfg)
    chosen = [task for task in tasks if task.id == (cfg.task or tasks[0].id)]
    require(chosen, f"--task {cfg.task}: no task of split {cfg.split} has this id; the first is {tasks[0].id}")
    group = run_tasks(policy, chosen, cfg, cfg.responder, cfg.temperature, "show", cfg.group, simulator)
    e, advantages = group[0], role_advantages([replace(e, group=0) for e in group], cfg.baseline, cfg.scale_advantages)
    print("\n--- a rehearsal:\n".join(paint_row(policy, row) for row in e.rows))
    tags = [tag for row in e.rows for tag in row.tags]
    counts = [f"{tags.count(tag)} {name}" for tag, name in {CONTEXT: "context", **ROLE_NAMES}.items()]
    print("\ntokens: " + ", ".join(counts))
    truths = compare_responses(e) if e.task.world else [(False, "(this task has none)")] * len(e.responses)
    for call, text, imagined, (same, truth) in zip(e.calls, e.responses, e.rehearsed, truths):
        print(f"{call['name']} {compact(call['arguments'])} -> {text}  {'imagined' if imagined else 'real'}; "
              f"the world: {'the same' if same else truth}")
    for check, verdict in zip(e.task.checks, e.verdicts):
        said = "no verdict" if verdict is None else {0: "FAIL", 1: "pass"}.get(verdict, f"{verdict:.2f}")
        print(f"{said}  {compact(check)}")
    shown = ["no verdict" if other.reward is None else f"{other.reward:.2f}" for other in group]
    print(f"ended: {e.over}; reward {shown[0]}\nthe group (reward, advantage of act, of rehearse):")
    for i in range(len(group)):
        values = [f"{advantages[i, role]:+.4f}" if (i, role) in advantages else "   -   " for role in ROLE_NAMES]
        print("  ".join([f"  {shown[i]}", *values]))

def paint_row(policy, row):
    """The text of a row with every role visible: colours on a terminal, [act| ] and [rehearse| ] marks in a pipe."""
    text, colours = "", {CONTEXT: "\033[2m", ACT: "\033[1;32m", REHEARSE: "\033[1;35m"}
    for tag, pairs in itertools.groupby(zip(row.tags, row.ids), key=lambda pair: pair[0]):
        part = policy.tokenizer.decode([token for _, token in pairs], skip_special_tokens=False)
        marked = part if tag == CONTEXT else f"[{ROLE_NAMES[tag]}|{part}]"
        text += f"{colours[tag]}{part}\033[0m" if sys.stdout.isatty() else marked
    return text

def command_bench(cfg):
    """`bench`: one JSON line: speed, memory and precision of a rollout (sampled tokens) and an update (all tokens) with
    random weights. Such a model hardly ever ends a turn: an episode is one turn of --max-act-tokens. Speeds compare,
    but are not a run's."""
    device, tasks = pick_device(cfg), load_tasks("toy")[:cfg.tasks_per_round]
    policy = load_policy(f"random:{cfg.model.split('/')[-1].removeprefix('random:')}", device, cfg)
    optimizer, groups = torch.optim.AdamW(policy.model.parameters(), lr=cfg.lr), [*range(len(tasks))] * cfg.group
    for name in ("warm-up", "timed"):                   # the first pass pays for allocations and kernels
        start = time.time()
        episodes = rollout(policy, tasks * cfg.group, cfg, "rehearsal", seeded(device, name), 1.0, groups)
        middle = time.time()
        for n, e in enumerate(episodes):                # it solves nothing: made-up rewards give something to learn
            e.reward = n // len(tasks) % 2
        samples = training_samples(episodes, cfg)
        require(samples, "nothing to time: --group must be at least 2, and --max-tokens must exceed the prompts")
        _, error, _ = update(policy, optimizer, samples, cfg) or require(False, "the loss is not finite: lower --lr")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        end = time.time()
    sampled = sum(tag != CONTEXT for e in episodes for tag in e.row.tags)
    shape, lengths = policy.model.config, [len(s.row.ids) for s in samples]
    parameters = sum(p.numel() for p in policy.model.parameters())
    attention = shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
    flops = sum(6 * parameters * n + 6 * attention * n * n for n in lengths)    # forward and backward, causal attention
    a = torch.randn(2, 2048, 2048, device=device, dtype=torch.bfloat16 if policy.bfloat16 else torch.float32)
    timer = torch.utils.benchmark.Timer("a @ a", globals={"a": a}, num_threads=cfg.threads)
    peak = 4 * 2048 ** 3 / timer.blocked_autorange().median     # operations a second in a large matrix product
    print(compact({
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "model": cfg.model,
        "parameters": parameters, "update_tokens_per_second": round(sum(lengths) / (end - middle)),
        "rollout_tokens_per_second": round(sampled / (middle - start)),
        "matmul_tflops": round(peak / 1e12, 2), "model_flops_utilisation": round(flops / (end - middle) / peak, 3),
        "peak_memory_gib": peak_memory(), "first_ratio_error": error}))

@functools.cache
def idle(task):
    """The graded episode of somebody who calls nothing and answers every user turn with nothing."""
    e = Episode(task, 0, answers=[""] * len(task.user), ends=[0] * len(task.user), over="done")
    e.reward, e.verdicts = grade(task, [], e.answers, e)
    return e

def kinds(tasks, split):
    """What stands beside a benchmark's numbers, as lines: whose verdicts they are, on how many tasks of which split,
    what doing nothing scores, what is approximate (Task.hidden: verdict, label)."""
    lines = []
    for verdict in sorted({task.hidden["verdict"] for task in tasks if "verdict" in task.hidden}):
        these = [task for task in tasks if task.hidden.get("verdict") == verdict]
        nothing = [idle(task) for task in these] if verdict != "judge" else []
        floor = f"success {mean(e.success for e in nothing):.3f}, reward {mean(e.reward for e in nothing):.3f}" \
            if nothing else "the judge is not asked"
        lines.append(f"{verdict} verdicts, split {split}, {len(these)} tasks; doing nothing: {floor}")
        lines += sorted({f"  {task.hidden['label']}" for task in these if "label" in task.hidden})
    return lines

def report(episodes, samples, split):
    """`kinds`, and the scores of `samples` episodes of each task with their deviation; nothing for tasks that belong to
    no benchmark. Task.hidden["metric"], a function of episodes and samples, says what a benchmark counts itself."""
    part = [e for e in episodes if "verdict" in e.task.hidden]
    each = [mean(e.success for e in part[n::samples]) for n in range(samples)] if part else [None]
    show = lambda values: "-" if (value := mean(values)) is None else f"{value:.3f}"
    spread = f" +- {statistics.stdev(each):.3f} (deviation over samples)" if len(each) > 1 and None not in each else ""
    scores = f"  success {show(e.success for e in part)}{spread}, reward {show(e.reward for e in part)}; {samples} " \
             f"samples a task, {sum(not e.scored for e in part)} episodes unscored"
    metrics = dict.fromkeys(e.task.hidden["metric"] for e in part if "metric" in e.task.hidden)
    lines = kinds([*{(e.task.domain, e.task.id): e.task for e in part}.values()], split) + [scores] * bool(part)
    return lines + [f"  {metric([e for e in part if e.task.hidden.get('metric') == metric], samples)}"
                    for metric in metrics]
