"""Output of tools on a node about the node and its fabric, for tests of the readers."""

from __future__ import annotations

LEAF, SPINE = "MF0;leaf01:MQM8700/U1", "MF0;spine01:MQM8700/U1"
FABRIC = f"""\
#
# Topology file: generated on Mon Jan  5 10:00:00 2026
Non-Chassis Nodes

vendid=0x2c9
devid=0xd2f0
sysimgguid=0x1
switchguid=0x1(1)
Switch\t41 "S-0000000000000001"\t\t# "{LEAF}" enhanced port 0 lid 1 lmc 0
[1]\t"H-0000000000000011"[1](11) \t\t# "host01 mlx5_0" lid 10 4xHDR
[2]\t"H-0000000000000012"[1](12) \t\t# "host02 HCA-1" lid 11 2xHDR s=4 w=2 v=4
[39]\t"S-0000000000000002"[1]\t\t# "{SPINE}" lid 2 4xFDR
[40]\t"S-0000000000000002"[2]\t\t# "{SPINE}" lid 2 4xFDR
[41]\t"H-00000000000000aa"[1](aa) \t\t# "Mellanox Technologies Aggregation Node" lid 3 4xHDR

Switch\t41 "S-0000000000000002"\t\t# "{SPINE}" enhanced port 0 lid 2 lmc 0
[1][ext 3]\t"S-0000000000000001"[39]\t\t# "{LEAF}" lid 1 4xFDR
[2]\t"S-0000000000000001"[40]\t\t# "{LEAF}" lid 1 ??xFDR

Ca\t2 "H-0000000000000011"\t\t# "host01 mlx5_0"
[1](11) \t"S-0000000000000001"[1]\t\t# lid 10 lmc 0 "{LEAF}" lid 1 4xHDR
[2](13) \t"H-0000000000000013"[1] (14) \t\t# lid 0 lmc 0 "host01 mlx5_1" lid 0 4xEDR

Ca\t1 "H-0000000000000013"\t\t# "host01 mlx5_1"
[1](14) \t"H-0000000000000011"[2] (13) \t\t# lid 0 lmc 0 "host01 mlx5_0" lid 0 4xEDR

Ca\t1 "H-0000000000000012"\t\t# "host02 HCA-1"
[1](12) \t"S-0000000000000001"[2]\t\t# lid 11 lmc 0 "{LEAF}" lid 1 2xHDR

Ca\t1 "H-00000000000000aa"\t\t# "Mellanox Technologies Aggregation Node"
[1](aa) \t"S-0000000000000001"[41]\t\t# lid 3 lmc 0 "{LEAF}" lid 1 4xHDR
"""
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_1
"""
HEADER = "\tGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
ROWS = (
    "GPU0\t X \tNV18\tNV18\tPXB\tNODE\t0-63,128-191\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tPIX\tSYS\t0-63,128-191\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tSYS\tSYS\t64-127,192-255\t1\t\tN/A\n"
    "NIC0\tPXB\tPIX\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tNODE\tSYS\tSYS\tSYS\t X \t\t\t\t\n"
)
MATRIX = HEADER + ROWS + LEGEND
SWITCHES = {"0000:05:00.0": 5, "0000:06:00.0": 4, "0000:07:00.0": 5, "0000:08:00.0": 4}


def pci(
    address: str, inside: str = "", *, of: str = "0x060400", speed: str = "32.0 GT/s PCIe", width: str = "16"
) -> str:
    return f'<pci busid="{address}" class="{of}" link_speed="{speed}" link_width="{width}">{inside}</pci>\n'


def gpu(number: int, address: str, links: dict[str, int] | None = None, *, to: str = "0x068000", **link: str) -> str:
    nvlinks = "".join(f'<nvlink target="{end}" count="{n}" tclass="{to}"/>' for end, n in (links or {}).items())
    inside = f'\n<gpu dev="{number}" sm="90" rank="{number}" gdr="1">{nvlinks}</gpu>'
    return pci(address, inside, of="0x030200", **link)


def net(name: str, address: str, speed: str = "400000") -> str:
    inside = f'<nic><net name="{name}" dev="0" speed="{speed}" port="1" guid="0x0" maxconn="131072" gdr="1"/></nic>'
    return pci(address, inside, of="0x020700")


def system(*cpus: str, hosts: tuple[str, ...] = ()) -> str:
    named = [f' host_hash="{host}"' for host in hosts] or [""] * len(cpus)
    inside = "".join(
        f'<cpu{host} numaid="{i}" affinity="ff,00" arch="x86_64">\n{cpu}</cpu>\n'
        for i, (cpu, host) in enumerate(zip(cpus, named, strict=True))
    )
    return f'<system version="1">\n{inside}</system>\n'


DOCTYPE = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
PRODUCT = "NVIDIA H100 80GB HBM3"


def queried(
    number: int, *, memory: str = "81559 MiB", mig: str = "Disabled", generation: str = "5", more: str = ""
) -> str:
    address = f"00000000:{number:02X}:00.0"
    return f"""
	<gpu id="{address}">
		<product_name>{PRODUCT}</product_name>
		<mig_mode><current_mig>{mig}</current_mig><pending_mig>{mig}</pending_mig></mig_mode>
		<pci>
			<pci_bus_id>{address}</pci_bus_id>
			<pci_gpu_link_info>
				<pcie_gen><max_link_gen>{generation}</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>
				<link_widths><max_link_width>16x</max_link_width><current_link_width>4x</current_link_width></link_widths>
			</pci_gpu_link_info>
		</pci>
		<fb_memory_usage><total>{memory}</total><reserved>551 MiB</reserved><used>0 MiB</used></fb_memory_usage>
		<bar1_memory_usage><total>131072 MiB</total></bar1_memory_usage>{more}
	</gpu>"""


def log(*gpus: str, attached: int | None = None) -> str:
    count = len(gpus) if attached is None else attached
    inside = "".join(gpus)
    return f"{DOCTYPE}<nvidia_smi_log>\n\t<attached_gpus>{count}</attached_gpus>{inside}\n</nvidia_smi_log>\n"


def rocm(types: list[list[str]], weights: list[list[int]] | None = None) -> str:
    """Return what `rocm-smi --showtopo` prints of these link types and weights."""
    count = len(types)

    def block(title: str, cells: list[list[str]]) -> str:
        names = [f"GPU{index}" for index in range(count)]
        rows = [[names[a], *("0" if a == b else cells[a][b] for b in range(count))] for a in range(count)]
        lines = "".join("   ".join(row) + "\n" for row in rows)
        return f"==== {title} between two GPUs ====\n       {'   '.join(names)}\n{lines}\n"

    weights = weights or [[15] * count for _ in range(count)]
    return "\n" + block("Weight", [[str(each) for each in row] for row in weights]) + block("Link Type", types)
