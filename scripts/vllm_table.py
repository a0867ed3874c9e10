def describe(r):
    out=[f"source {r['source']['outcome']} {r['source']['reason'][:150]}"]
    for k,v in r["folders"].items():
        if "refused" in v: out.append(f"{k}: refused {v['refused'][:140]}")
        else: out.append(f"{k}: {v['outcome']} doctor={list(v['doctor'])} inspect={v['inspect']} {v['reason'][:260]}")
    return out
def differences(r):
    return [k for k,v in r["folders"].items() if "refused" not in v and (v["outcome"]=="loads")==bool(v["doctor"])]
