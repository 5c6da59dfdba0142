import torch, time, copy
from torch import nn
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.device_mesh import init_device_mesh
import odc
from process_ranks import run_ranks

def model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(13,13),nn.Tanh()) for _ in range(3)], nn.Linear(13,5))

def train(rank, ws, use_odc, kw=None, mp=None):
    m=model(); mesh=init_device_mesh("cpu",(ws,))
    args=dict(mesh=mesh)
    if mp: args["mp_policy"]=MixedPrecisionPolicy(param_dtype=torch.bfloat16,reduce_dtype=torch.float32)
    for l in list(m)[:3]: fully_shard(l,**args)
    fully_shard(m,**args)
    opt=torch.optim.AdamW(m.parameters(),lr=1e-2)
    s=odc.patch_fsdp(m,**(kw or {})) if use_odc else None
    losses=[]
    for k in range(20):
        g=torch.Generator().manual_seed(k)
        X=torch.randn(2*ws,6,13,generator=g)
        def micro():
            for j in range(2):
                (m(X[rank*2+j]).float().pow(2).sum()/X.numel()).backward()
        if s:
            with s.minibatch(): micro()
        else: micro()
        n=torch.nn.utils.clip_grad_norm_(m.parameters(),0.02)
        opt.step(); opt.zero_grad(); losses.append(float(n.full_tensor()))
    sd={k:v.full_tensor() for k,v in m.state_dict().items()}
    st=s.stats() if s else None
    if s: s.close()
    return losses,{k:v.numpy() for k,v in sd.items()},st

def test_x():
    for mp in (None,1):
        a=run_ranks(2,train,False,None,mp)[0]
        for kw in ({},{"deterministic":True},{"accumulate":"daemon"}):
            t=time.time()
            b=run_ranks(2,train,True,kw,mp)[0]
            d=max(abs(a[1][k]-b[1][k]).max()/abs(a[1][k]).max() for k in a[1])
            print(mp,kw,d,a[0][-1],b[0][-1],time.time()-t,b[2])
            assert d<1e-5
