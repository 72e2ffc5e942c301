BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE arm (
	id INTEGER NOT NULL, 
	study_id INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	is_base BOOLEAN NOT NULL, 
	position INTEGER NOT NULL, 
	change JSON NOT NULL, 
	config JSON NOT NULL, 
	CONSTRAINT pk_arm PRIMARY KEY (id), 
	CONSTRAINT fk_arm_study_id FOREIGN KEY(study_id) REFERENCES study (id) ON DELETE CASCADE, 
	CONSTRAINT uq_arm_study_id_name UNIQUE (study_id, name)
);
INSERT INTO "arm" VALUES(1,1,'base',1,0,'{}','{"mqar": {"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.02, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}, "parity": {"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.02, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}}');
INSERT INTO "arm" VALUES(2,1,'gka',0,1,'{"rule.name": ["comba", "gka"], "rule.transition": ["splr", null], "rule.beta": [{"sigmoid": {"max": 1.0}}, null], "rule.b": [{"head_sigmoid": {"init": 0.5}}, null], "rule.d": [{"head": {"init": 0.02}}, null], "rule.correction": ["k", null], "rule.silu": ["qkv", null], "rule.normalize": [true, null], "rule.ridge": [null, 0.02], "rule.adaptive": [null, true], "rule.solver": [null, "chebyshev"], "rule.iterations": [null, 2]}','{"mqar": {"rule": {"name": "gka", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "ridge": 0.02, "adaptive": true, "solver": "chebyshev", "iterations": 2}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.02, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}, "parity": {"rule": {"name": "gka", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "ridge": 0.02, "adaptive": true, "solver": "chebyshev", "iterations": 2}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.02, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}}');
INSERT INTO "arm" VALUES(3,1,'rdn',0,2,'{"rule.name": ["comba", "rdn"], "rule.transition": ["splr", null], "rule.b": [{"head_sigmoid": {"init": 0.5}}, null], "rule.d": [{"head": {"init": 0.02}}, null], "rule.correction": ["k", null], "rule.gamma": [null, {"sigmoid": {"max": 1.0}}], "rule.loss": [null, "huber"], "rule.clip": [null, 1.0], "rule.output": [null, "gated"], "rule.fitting": [null, true]}','{"mqar": {"rule": {"name": "rdn", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "gamma": {"sigmoid": {"max": 1.0}}, "loss": "huber", "clip": 1.0, "output": "gated", "fitting": true, "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.02, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}, "parity": {"rule": {"name": "rdn", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "gamma": {"sigmoid": {"max": 1.0}}, "loss": "huber", "clip": 1.0, "output": "gated", "fitting": true, "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.02, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}}');
INSERT INTO "arm" VALUES(4,1,'hybrid',0,3,'{"model.layers": [1, 2], "model.attention": [[], [1]]}','{"mqar": {"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 2, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [1], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.02, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}, "parity": {"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 2, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [1], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.02, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}}');
CREATE TABLE arm_trial (
	arm_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	"values" JSON NOT NULL, 
	CONSTRAINT pk_arm_trial PRIMARY KEY (arm_id, trial_id, number), 
	CONSTRAINT fk_arm_trial_arm_id FOREIGN KEY(arm_id) REFERENCES arm (id) ON DELETE CASCADE, 
	CONSTRAINT fk_arm_trial_trial_id FOREIGN KEY(trial_id) REFERENCES trial (id) ON DELETE CASCADE
);
INSERT INTO "arm_trial" VALUES(1,1,0,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(1,2,1,'{"train.lr": 0.008593643450468182}');
INSERT INTO "arm_trial" VALUES(2,3,0,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(2,4,1,'{"train.lr": 0.008593643450468182}');
INSERT INTO "arm_trial" VALUES(3,5,0,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(3,6,1,'{"train.lr": 0.008593643450468182}');
INSERT INTO "arm_trial" VALUES(4,7,0,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(4,8,1,'{"train.lr": 0.008593643450468182}');
INSERT INTO "arm_trial" VALUES(1,9,0,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(1,10,1,'{"train.lr": 0.008593643450468182}');
INSERT INTO "arm_trial" VALUES(2,11,0,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(2,12,1,'{"train.lr": 0.008593643450468182}');
INSERT INTO "arm_trial" VALUES(3,13,0,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(3,14,1,'{"train.lr": 0.008593643450468182}');
INSERT INTO "arm_trial" VALUES(4,15,0,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(4,16,1,'{"train.lr": 0.008593643450468182}');
INSERT INTO "arm_trial" VALUES(2,17,2,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(3,18,2,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(4,19,2,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(1,20,2,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(4,21,2,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(2,22,2,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(3,23,2,'{"train.lr": 0.012974750781053066}');
INSERT INTO "arm_trial" VALUES(1,24,2,'{"train.lr": 0.012974750781053066}');
CREATE TABLE artifact (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	kind VARCHAR NOT NULL, 
	path VARCHAR NOT NULL, 
	sha256 VARCHAR NOT NULL, 
	bytes BIGINT NOT NULL, 
	CONSTRAINT pk_artifact PRIMARY KEY (id), 
	CONSTRAINT fk_artifact_run_id FOREIGN KEY(run_id) REFERENCES run (id) ON DELETE CASCADE
);
INSERT INTO "artifact" VALUES(1,17,'weights','/released/runs/weights/de819afca364fd60619c277c7566589729c54b3fc083c0586023f46f1f555390/seed_1.pt','0c4a4485910d606a11079694b2986b57509f52c1aa47a9ae2bb32522dd3e950a',20069);
INSERT INTO "artifact" VALUES(2,18,'weights','/released/runs/weights/de819afca364fd60619c277c7566589729c54b3fc083c0586023f46f1f555390/seed_2.pt','f84e9a9f65a1a16f43d347de8af186a458ccb1919f43e7a096a93d3e25e18349',20069);
INSERT INTO "artifact" VALUES(3,19,'weights','/released/runs/weights/d267cd3aae0bf5d29af6fa01ab0534e8d7d6df82e1ea2ed702ca4491b113912d/seed_1.pt','fdd04192d62b49cdaffecd37479f2a52ffe3c64529991fd6232c623632246fee',20765);
INSERT INTO "artifact" VALUES(4,20,'weights','/released/runs/weights/d267cd3aae0bf5d29af6fa01ab0534e8d7d6df82e1ea2ed702ca4491b113912d/seed_2.pt','70b693a0e0f1c959df9d171d886b74a0eb8bf1a39375002c86f67eca61096ab0',20765);
INSERT INTO "artifact" VALUES(5,21,'weights','/released/runs/weights/c7a7524f9ca48b499bb3b29e22378946a94ea47ddb8bf1d46df0b2987a3d0404/seed_1.pt','92591cb709ca00723418368bdab2d81a43843db92ccef6884c3e91307f9aaedb',38133);
INSERT INTO "artifact" VALUES(6,22,'weights','/released/runs/weights/c7a7524f9ca48b499bb3b29e22378946a94ea47ddb8bf1d46df0b2987a3d0404/seed_2.pt','3429897ac33e3f7e32580608f6f707a115b7a376dd8e505b1f654f0a460400ae',38133);
INSERT INTO "artifact" VALUES(7,23,'weights','/released/runs/weights/e7aad8d2412780a03dece0961cd704e38596f0b566831a48d6fa1ca1875aed74/seed_1.pt','8d631766b39170e81e8b5f482a8287faf023e022260afe62f7dab093d1215505',20953);
INSERT INTO "artifact" VALUES(8,24,'weights','/released/runs/weights/e7aad8d2412780a03dece0961cd704e38596f0b566831a48d6fa1ca1875aed74/seed_2.pt','0bf42300a1b41479284511e53ad641cff4c91db1a256379769796e53330a909b',20953);
INSERT INTO "artifact" VALUES(9,25,'weights','/released/runs/weights/be436dfbc17c0a79c1c7a4da835be56520a71ec3a0fed0c77bf3a991f03eb5f5/seed_1.pt','305324d1b2fb80daeaed64f5781fa6c8b30e4d2e599da6fc5c3d24af8a85b782',39989);
INSERT INTO "artifact" VALUES(10,26,'weights','/released/runs/weights/be436dfbc17c0a79c1c7a4da835be56520a71ec3a0fed0c77bf3a991f03eb5f5/seed_2.pt','3eedca70f729ddf5e1e433c9e5561444083bc4fb0d97c0dcfc0735fff4e23399',39989);
INSERT INTO "artifact" VALUES(11,27,'weights','/released/runs/weights/75411c0e7d8e57f796b624506130c905cefe835a94161f0c8d6db701aeda66e6/seed_1.pt','cf9fe606e7854d3c98afc9dab7623a81c435c807f22ddb35f9e81d2b40b7ff00',21925);
INSERT INTO "artifact" VALUES(12,28,'weights','/released/runs/weights/75411c0e7d8e57f796b624506130c905cefe835a94161f0c8d6db701aeda66e6/seed_2.pt','799b07c3052c8529ae246deadb78b37d53b2f57585c546bd75c58d1d64bbfb1c',21925);
INSERT INTO "artifact" VALUES(13,29,'weights','/released/runs/weights/6a575ced0318e7c708f4a881e6ba45d692fc426bb3be5e59f4d51560c472b223/seed_1.pt','c1a62a8d3b6a1ba4c609a5644ea4836b449f8fdb20358c12e669b6fab21bd2db',22621);
INSERT INTO "artifact" VALUES(14,30,'weights','/released/runs/weights/6a575ced0318e7c708f4a881e6ba45d692fc426bb3be5e59f4d51560c472b223/seed_2.pt','5e4410694cc44a623a7658f059b9f00f25ce7013dfe07778aaaa1443ce256da6',22621);
INSERT INTO "artifact" VALUES(15,31,'weights','/released/runs/weights/d158431b2eaccbc0f617ba29697ea39eb4787c6055a308294a3a7a14d2a9d20e/seed_1.pt','2170aefeaf2040931d8d3f6cba47edc3fefaf1f65604ff697322f6df593cbcf1',22809);
INSERT INTO "artifact" VALUES(16,32,'weights','/released/runs/weights/d158431b2eaccbc0f617ba29697ea39eb4787c6055a308294a3a7a14d2a9d20e/seed_2.pt','8f89b680a42cd6a8223350e4261ad7581b8dfefcb6512965f4a7c71b31ebcb04',22809);
CREATE TABLE metric (
	run_id INTEGER NOT NULL, 
	split VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	step INTEGER NOT NULL, 
	value DOUBLE NOT NULL, 
	CONSTRAINT pk_metric PRIMARY KEY (run_id, split, name, step), 
	CONSTRAINT fk_metric_run_id FOREIGN KEY(run_id) REFERENCES run (id) ON DELETE CASCADE
)
 WITHOUT ROWID

;
INSERT INTO "metric" VALUES(1,'cost','flops_per_token',4,11296.0);
INSERT INTO "metric" VALUES(1,'cost','state_size',4,272.0);
INSERT INTO "metric" VALUES(1,'train','loss',2,7.9666805267333984375e-01);
INSERT INTO "metric" VALUES(1,'train','loss',4,4.8663291335105895996e-01);
INSERT INTO "metric" VALUES(1,'validation','loss',2,0.863164871931076);
INSERT INTO "metric" VALUES(1,'validation','loss',4,6.98996741324663162231e-01);
INSERT INTO "metric" VALUES(1,'validation','loss@11-40',2,0.963871531188488);
INSERT INTO "metric" VALUES(1,'validation','loss@11-40',4,7.59554013609886169433e-01);
INSERT INTO "metric" VALUES(1,'validation','output_rms',2,8.2872606813907623291e-02);
INSERT INTO "metric" VALUES(1,'validation','output_rms',4,8.56146886944770812988e-02);
INSERT INTO "metric" VALUES(1,'validation','output_rms@11-40',2,6.4694792032241821289e-02);
INSERT INTO "metric" VALUES(1,'validation','output_rms@11-40',4,0.0656304657459259);
INSERT INTO "metric" VALUES(1,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(1,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(1,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(1,'validation','scaled_accuracy@11-40',4,0.5);
INSERT INTO "metric" VALUES(2,'cost','flops_per_token',4,11296.0);
INSERT INTO "metric" VALUES(2,'cost','state_size',4,272.0);
INSERT INTO "metric" VALUES(2,'train','loss',2,8.8249874114990234375e-01);
INSERT INTO "metric" VALUES(2,'train','loss',4,5.52998065948486328125e-01);
INSERT INTO "metric" VALUES(2,'validation','loss',2,1.12866487540304660797e+00);
INSERT INTO "metric" VALUES(2,'validation','loss',4,8.89466818422079086303e-01);
INSERT INTO "metric" VALUES(2,'validation','loss@11-40',2,1.21575815789401531219e+00);
INSERT INTO "metric" VALUES(2,'validation','loss@11-40',4,1.0452549271285533905e+00);
INSERT INTO "metric" VALUES(2,'validation','output_rms',2,8.08164700865745544433e-02);
INSERT INTO "metric" VALUES(2,'validation','output_rms',4,8.27224105596542358398e-02);
INSERT INTO "metric" VALUES(2,'validation','output_rms@11-40',2,6.46800473332405090332e-02);
INSERT INTO "metric" VALUES(2,'validation','output_rms@11-40',4,6.55433833599090576171e-02);
INSERT INTO "metric" VALUES(2,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(2,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(2,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(2,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(3,'cost','flops_per_token',4,23744.0);
INSERT INTO "metric" VALUES(3,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(3,'train','loss',2,8.06680142879486083984e-01);
INSERT INTO "metric" VALUES(3,'train','loss',4,5.13889312744140625e-01);
INSERT INTO "metric" VALUES(3,'validation','loss',2,8.22401121258735656738e-01);
INSERT INTO "metric" VALUES(3,'validation','loss',4,6.49429794400930404663e-01);
INSERT INTO "metric" VALUES(3,'validation','loss@11-40',2,9.05883982777595520019e-01);
INSERT INTO "metric" VALUES(3,'validation','loss@11-40',4,7.49499641358852386474e-01);
INSERT INTO "metric" VALUES(3,'validation','output_rms',2,1.16530932486057281494e-01);
INSERT INTO "metric" VALUES(3,'validation','output_rms',4,1.19278490543365478515e-01);
INSERT INTO "metric" VALUES(3,'validation','output_rms@11-40',2,1.29468202590942382812e-01);
INSERT INTO "metric" VALUES(3,'validation','output_rms@11-40',4,1.29029944539070129394e-01);
INSERT INTO "metric" VALUES(3,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(3,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(3,'validation','scaled_accuracy@11-40',2,0.5);
INSERT INTO "metric" VALUES(3,'validation','scaled_accuracy@11-40',4,0.5);
INSERT INTO "metric" VALUES(4,'cost','flops_per_token',4,23744.0);
INSERT INTO "metric" VALUES(4,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(4,'train','loss',2,8.76790523529052734375e-01);
INSERT INTO "metric" VALUES(4,'train','loss',4,0.570347785949707);
INSERT INTO "metric" VALUES(4,'validation','loss',2,1.1300657317042350769e+00);
INSERT INTO "metric" VALUES(4,'validation','loss',4,9.12437912076711654663e-01);
INSERT INTO "metric" VALUES(4,'validation','loss@11-40',2,1.13124973699450492858e+00);
INSERT INTO "metric" VALUES(4,'validation','loss@11-40',4,9.72999867051839828491e-01);
INSERT INTO "metric" VALUES(4,'validation','output_rms',2,1.12080737948417663574e-01);
INSERT INTO "metric" VALUES(4,'validation','output_rms',4,1.13023273646831512451e-01);
INSERT INTO "metric" VALUES(4,'validation','output_rms@11-40',2,1.29354134202003479003e-01);
INSERT INTO "metric" VALUES(4,'validation','output_rms@11-40',4,1.29557088017463684082e-01);
INSERT INTO "metric" VALUES(4,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(4,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(4,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(4,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(5,'cost','flops_per_token',4,19136.0);
INSERT INTO "metric" VALUES(5,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(5,'train','loss',2,0.78847336769104);
INSERT INTO "metric" VALUES(5,'train','loss',4,4.92486119270324707031e-01);
INSERT INTO "metric" VALUES(5,'validation','loss',2,8.39491389691829681396e-01);
INSERT INTO "metric" VALUES(5,'validation','loss',4,6.68742567300796508789e-01);
INSERT INTO "metric" VALUES(5,'validation','loss@11-40',2,9.60514551028609275817e-01);
INSERT INTO "metric" VALUES(5,'validation','loss@11-40',4,7.52547720447182655334e-01);
INSERT INTO "metric" VALUES(5,'validation','output_rms',2,6.21966682374477386474e-02);
INSERT INTO "metric" VALUES(5,'validation','output_rms',4,0.0645935982465744);
INSERT INTO "metric" VALUES(5,'validation','output_rms@11-40',2,5.48427104949951171875e-02);
INSERT INTO "metric" VALUES(5,'validation','output_rms@11-40',4,5.70375137031078338623e-02);
INSERT INTO "metric" VALUES(5,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(5,'validation','scaled_accuracy',4,0.5);
INSERT INTO "metric" VALUES(5,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(5,'validation','scaled_accuracy@11-40',4,0.5);
INSERT INTO "metric" VALUES(6,'cost','flops_per_token',4,19136.0);
INSERT INTO "metric" VALUES(6,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(6,'train','loss',2,8.7184530496597290039e-01);
INSERT INTO "metric" VALUES(6,'train','loss',4,5.62053442001342773437e-01);
INSERT INTO "metric" VALUES(6,'validation','loss',2,1.14176574349403381347e+00);
INSERT INTO "metric" VALUES(6,'validation','loss',4,8.80773412063717842102e-01);
INSERT INTO "metric" VALUES(6,'validation','loss@11-40',2,1.18320819362998);
INSERT INTO "metric" VALUES(6,'validation','loss@11-40',4,1.01353450492024421691e+00);
INSERT INTO "metric" VALUES(6,'validation','output_rms',2,0.062173992395401);
INSERT INTO "metric" VALUES(6,'validation','output_rms',4,6.19164332747459411621e-02);
INSERT INTO "metric" VALUES(6,'validation','output_rms@11-40',2,5.56897968053817749023e-02);
INSERT INTO "metric" VALUES(6,'validation','output_rms@11-40',4,5.55995032191276550292e-02);
INSERT INTO "metric" VALUES(6,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(6,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(6,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(6,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(7,'cost','flops_per_token',4,18464.0);
INSERT INTO "metric" VALUES(7,'cost','state_size',4,1664.0);
INSERT INTO "metric" VALUES(7,'train','loss',2,6.63013577461242675781e-01);
INSERT INTO "metric" VALUES(7,'train','loss',4,4.58310276269912719726e-01);
INSERT INTO "metric" VALUES(7,'validation','loss',2,6.36536221951246261596e-01);
INSERT INTO "metric" VALUES(7,'validation','loss',4,0.572401762008667);
INSERT INTO "metric" VALUES(7,'validation','loss@11-40',2,8.65082759410142898559e-01);
INSERT INTO "metric" VALUES(7,'validation','loss@11-40',4,7.43478991091251373291e-01);
INSERT INTO "metric" VALUES(7,'validation','output_rms',2,5.14598667621612548828e-01);
INSERT INTO "metric" VALUES(7,'validation','output_rms',4,6.09690487384796142578e-01);
INSERT INTO "metric" VALUES(7,'validation','output_rms@11-40',2,4.73772495985031127929e-01);
INSERT INTO "metric" VALUES(7,'validation','output_rms@11-40',4,0.569846510887146);
INSERT INTO "metric" VALUES(7,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(7,'validation','scaled_accuracy',4,0.5);
INSERT INTO "metric" VALUES(7,'validation','scaled_accuracy@11-40',2,0.5);
INSERT INTO "metric" VALUES(7,'validation','scaled_accuracy@11-40',4,0.5);
INSERT INTO "metric" VALUES(8,'cost','flops_per_token',4,18464.0);
INSERT INTO "metric" VALUES(8,'cost','state_size',4,1664.0);
INSERT INTO "metric" VALUES(8,'train','loss',2,7.24965810775756835937e-01);
INSERT INTO "metric" VALUES(8,'train','loss',4,4.83840227127075195312e-01);
INSERT INTO "metric" VALUES(8,'validation','loss',2,7.97462508082389831542e-01);
INSERT INTO "metric" VALUES(8,'validation','loss',4,6.48624639958143234252e-01);
INSERT INTO "metric" VALUES(8,'validation','loss@11-40',2,1.01169507205486297607e+00);
INSERT INTO "metric" VALUES(8,'validation','loss@11-40',4,8.62132970243692398071e-01);
INSERT INTO "metric" VALUES(8,'validation','output_rms',2,4.14746254682540893554e-01);
INSERT INTO "metric" VALUES(8,'validation','output_rms',4,4.7808220982551574707e-01);
INSERT INTO "metric" VALUES(8,'validation','output_rms@11-40',2,3.82659554481506347656e-01);
INSERT INTO "metric" VALUES(8,'validation','output_rms@11-40',4,4.46116387844085693359e-01);
INSERT INTO "metric" VALUES(8,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(8,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(8,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(8,'validation','scaled_accuracy@11-40',4,0.5);
INSERT INTO "metric" VALUES(9,'cost','flops_per_token',4,9088.0);
INSERT INTO "metric" VALUES(9,'cost','state_size',4,272.0);
INSERT INTO "metric" VALUES(9,'train','loss',2,4.29312467575073242187e+00);
INSERT INTO "metric" VALUES(9,'train','loss',4,4.06040477752685546875e+00);
INSERT INTO "metric" VALUES(9,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(9,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(9,'validation','loss',2,4.87616306543350219726e+00);
INSERT INTO "metric" VALUES(9,'validation','loss',4,4.81485196948051452636e+00);
INSERT INTO "metric" VALUES(9,'validation','output_rms',2,5.76841272413730621337e-02);
INSERT INTO "metric" VALUES(9,'validation','output_rms',4,5.64651750028133392333e-02);
INSERT INTO "metric" VALUES(10,'cost','flops_per_token',4,9088.0);
INSERT INTO "metric" VALUES(10,'cost','state_size',4,272.0);
INSERT INTO "metric" VALUES(10,'train','loss',2,4.32031965255737304687e+00);
INSERT INTO "metric" VALUES(10,'train','loss',4,4.1165452003479);
INSERT INTO "metric" VALUES(10,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(10,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(10,'validation','loss',2,4.89270266890525817871e+00);
INSERT INTO "metric" VALUES(10,'validation','loss',4,4.86281210184097290039e+00);
INSERT INTO "metric" VALUES(10,'validation','output_rms',2,5.8372061699628829956e-02);
INSERT INTO "metric" VALUES(10,'validation','output_rms',4,5.75347654521465301513e-02);
INSERT INTO "metric" VALUES(11,'cost','flops_per_token',4,13440.0);
INSERT INTO "metric" VALUES(11,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(11,'train','loss',2,4.31343746185302734375e+00);
INSERT INTO "metric" VALUES(11,'train','loss',4,3.72187542915344238281e+00);
INSERT INTO "metric" VALUES(11,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(11,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(11,'validation','loss',2,4.64936605095863342285e+00);
INSERT INTO "metric" VALUES(11,'validation','loss',4,4.59790706634521484375e+00);
INSERT INTO "metric" VALUES(11,'validation','output_rms',2,8.63315984606742858886e-02);
INSERT INTO "metric" VALUES(11,'validation','output_rms',4,8.84104296565055847167e-02);
INSERT INTO "metric" VALUES(12,'cost','flops_per_token',4,13440.0);
INSERT INTO "metric" VALUES(12,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(12,'train','loss',2,4.35166263580322265625e+00);
INSERT INTO "metric" VALUES(12,'train','loss',4,3.80869913101196289062e+00);
INSERT INTO "metric" VALUES(12,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(12,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(12,'validation','loss',2,4.68830806016922);
INSERT INTO "metric" VALUES(12,'validation','loss',4,4.65943989157676696777e+00);
INSERT INTO "metric" VALUES(12,'validation','output_rms',2,0.0835173949599266);
INSERT INTO "metric" VALUES(12,'validation','output_rms',4,8.50087180733680725097e-02);
INSERT INTO "metric" VALUES(13,'cost','flops_per_token',4,13248.0);
INSERT INTO "metric" VALUES(13,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(13,'train','loss',2,4.23824739456176757812e+00);
INSERT INTO "metric" VALUES(13,'train','loss',4,3.90396261215209960937e+00);
INSERT INTO "metric" VALUES(13,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(13,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(13,'validation','loss',2,4.74713265895843505859e+00);
INSERT INTO "metric" VALUES(13,'validation','loss',4,4.70119744539260864257e+00);
INSERT INTO "metric" VALUES(13,'validation','output_rms',2,4.66666817665100097656e-02);
INSERT INTO "metric" VALUES(13,'validation','output_rms',4,0.0464177243411541);
INSERT INTO "metric" VALUES(14,'cost','flops_per_token',4,13248.0);
INSERT INTO "metric" VALUES(14,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(14,'train','loss',2,4.25670528411865234375e+00);
INSERT INTO "metric" VALUES(14,'train','loss',4,3.99516630172729492187e+00);
INSERT INTO "metric" VALUES(14,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(14,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(14,'validation','loss',2,4.76655262708663940429e+00);
INSERT INTO "metric" VALUES(14,'validation','loss',4,4.73459458351135253906e+00);
INSERT INTO "metric" VALUES(14,'validation','output_rms',2,4.65341843664646148681e-02);
INSERT INTO "metric" VALUES(14,'validation','output_rms',4,4.61986586451530456542e-02);
INSERT INTO "metric" VALUES(15,'cost','flops_per_token',4,16256.0);
INSERT INTO "metric" VALUES(15,'cost','state_size',4,928.0);
INSERT INTO "metric" VALUES(15,'train','loss',2,3.93213582038879394531e+00);
INSERT INTO "metric" VALUES(15,'train','loss',4,3.82513761520385742187e+00);
INSERT INTO "metric" VALUES(15,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(15,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(15,'validation','loss',2,4.76948449015617370605e+00);
INSERT INTO "metric" VALUES(15,'validation','loss',4,4.64815491437912);
INSERT INTO "metric" VALUES(15,'validation','output_rms',2,2.11409643292427062988e-01);
INSERT INTO "metric" VALUES(15,'validation','output_rms',4,2.11797669529914855957e-01);
INSERT INTO "metric" VALUES(16,'cost','flops_per_token',4,16256.0);
INSERT INTO "metric" VALUES(16,'cost','state_size',4,928.0);
INSERT INTO "metric" VALUES(16,'train','loss',2,3.94113397598266601562e+00);
INSERT INTO "metric" VALUES(16,'train','loss',4,3.96459603309631347656e+00);
INSERT INTO "metric" VALUES(16,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(16,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(16,'validation','loss',2,4.81120166182518);
INSERT INTO "metric" VALUES(16,'validation','loss',4,4.73912465572357177734e+00);
INSERT INTO "metric" VALUES(16,'validation','output_rms',2,2.10117802023887634277e-01);
INSERT INTO "metric" VALUES(16,'validation','output_rms',4,2.10503429174423217773e-01);
INSERT INTO "metric" VALUES(17,'cost','flops_per_token',4,23744.0);
INSERT INTO "metric" VALUES(17,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(17,'test','loss',4,1.21819009631872177124e+00);
INSERT INTO "metric" VALUES(17,'test','loss@11-40',4,1.73287742584943771362e+00);
INSERT INTO "metric" VALUES(17,'test','output_rms',4,4.9726832658052444458e-02);
INSERT INTO "metric" VALUES(17,'test','output_rms@11-40',4,5.43286837637424468994e-02);
INSERT INTO "metric" VALUES(17,'test','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(17,'test','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(17,'train','loss',2,2.25889158248901367187e+00);
INSERT INTO "metric" VALUES(17,'train','loss',4,3.82727670669555664062e+00);
INSERT INTO "metric" VALUES(17,'validation','loss',2,1.85324496589601039886e+00);
INSERT INTO "metric" VALUES(17,'validation','loss',4,1.68234210740774869918e+00);
INSERT INTO "metric" VALUES(17,'validation','loss@11-40',2,1.27946256846189498901e+00);
INSERT INTO "metric" VALUES(17,'validation','loss@11-40',4,1.16608690470457077026e+00);
INSERT INTO "metric" VALUES(17,'validation','output_rms',2,0.053779236972332);
INSERT INTO "metric" VALUES(17,'validation','output_rms',4,5.03132641315460205078e-02);
INSERT INTO "metric" VALUES(17,'validation','output_rms@11-40',2,5.87918199598789215087e-02);
INSERT INTO "metric" VALUES(17,'validation','output_rms@11-40',4,5.65481260418891906738e-02);
INSERT INTO "metric" VALUES(17,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(17,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(17,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(17,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(18,'cost','flops_per_token',4,23744.0);
INSERT INTO "metric" VALUES(18,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(18,'test','loss',4,1.72982713300734758377e+00);
INSERT INTO "metric" VALUES(18,'test','loss@11-40',4,1.72008420154452323913e+00);
INSERT INTO "metric" VALUES(18,'test','output_rms',4,8.75002369284629821777e-02);
INSERT INTO "metric" VALUES(18,'test','output_rms@11-40',4,9.1314531862735748291e-02);
INSERT INTO "metric" VALUES(18,'test','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(18,'test','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(18,'train','loss',2,3.0544109344482421875e+00);
INSERT INTO "metric" VALUES(18,'train','loss',4,2.97803211212158203125e+00);
INSERT INTO "metric" VALUES(18,'validation','loss',2,2.09218960348516702651e+00);
INSERT INTO "metric" VALUES(18,'validation','loss',4,2.08532798383384943008e+00);
INSERT INTO "metric" VALUES(18,'validation','loss@11-40',2,1.76642911881208419799e+00);
INSERT INTO "metric" VALUES(18,'validation','loss@11-40',4,1.65229698270559310913e+00);
INSERT INTO "metric" VALUES(18,'validation','output_rms',2,9.24368277192115783691e-02);
INSERT INTO "metric" VALUES(18,'validation','output_rms',4,9.15537327527999877929e-02);
INSERT INTO "metric" VALUES(18,'validation','output_rms@11-40',2,9.76031571626663208007e-02);
INSERT INTO "metric" VALUES(18,'validation','output_rms@11-40',4,9.7805239260196685791e-02);
INSERT INTO "metric" VALUES(18,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(18,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(18,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(18,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(19,'cost','flops_per_token',4,19136.0);
INSERT INTO "metric" VALUES(19,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(19,'test','loss',4,1.70282003749161958694e+00);
INSERT INTO "metric" VALUES(19,'test','loss@11-40',4,1.21257125027477741241e+00);
INSERT INTO "metric" VALUES(19,'test','output_rms',4,3.67583371698856353759e-02);
INSERT INTO "metric" VALUES(19,'test','output_rms@11-40',4,2.88476832211017608642e-02);
INSERT INTO "metric" VALUES(19,'test','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(19,'test','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(19,'train','loss',2,2.08582615852355957031e+00);
INSERT INTO "metric" VALUES(19,'train','loss',4,3.06578111648559570312e+00);
INSERT INTO "metric" VALUES(19,'validation','loss',2,1.75324700679630041122e+00);
INSERT INTO "metric" VALUES(19,'validation','loss',4,1.5814778301864862442e+00);
INSERT INTO "metric" VALUES(19,'validation','loss@11-40',2,1.84464439377188682556e+00);
INSERT INTO "metric" VALUES(19,'validation','loss@11-40',4,1.68606221862137317657e+00);
INSERT INTO "metric" VALUES(19,'validation','output_rms',2,3.57053391635417938232e-02);
INSERT INTO "metric" VALUES(19,'validation','output_rms',4,3.77282835543155670166e-02);
INSERT INTO "metric" VALUES(19,'validation','output_rms@11-40',2,3.50747257471084594726e-02);
INSERT INTO "metric" VALUES(19,'validation','output_rms@11-40',4,3.54053080081939697265e-02);
INSERT INTO "metric" VALUES(19,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(19,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(19,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(19,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(20,'cost','flops_per_token',4,19136.0);
INSERT INTO "metric" VALUES(20,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(20,'test','loss',4,1.98105800617486238479e+00);
INSERT INTO "metric" VALUES(20,'test','loss@11-40',4,1.77947301091626286506e+00);
INSERT INTO "metric" VALUES(20,'test','output_rms',4,4.86422590911388397216e-02);
INSERT INTO "metric" VALUES(20,'test','output_rms@11-40',4,5.71430884301662445068e-02);
INSERT INTO "metric" VALUES(20,'test','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(20,'test','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(20,'train','loss',2,3.42613744735717773437e+00);
INSERT INTO "metric" VALUES(20,'train','loss',4,3.01378965377807617187e+00);
INSERT INTO "metric" VALUES(20,'validation','loss',2,2.04422856541350483894e+00);
INSERT INTO "metric" VALUES(20,'validation','loss',4,2.04076025448739528656e+00);
INSERT INTO "metric" VALUES(20,'validation','loss@11-40',2,2.0361979878507554531e+00);
INSERT INTO "metric" VALUES(20,'validation','loss@11-40',4,1.94952291809022426605e+00);
INSERT INTO "metric" VALUES(20,'validation','output_rms',2,0.0506783202290535);
INSERT INTO "metric" VALUES(20,'validation','output_rms',4,5.14848642051219940185e-02);
INSERT INTO "metric" VALUES(20,'validation','output_rms@11-40',2,5.16557283699512481689e-02);
INSERT INTO "metric" VALUES(20,'validation','output_rms@11-40',4,5.45803532004356384277e-02);
INSERT INTO "metric" VALUES(20,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(20,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(20,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(20,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(21,'cost','flops_per_token',4,18464.0);
INSERT INTO "metric" VALUES(21,'cost','state_size',4,1664.0);
INSERT INTO "metric" VALUES(21,'test','loss',4,8.6782722175121307373e-01);
INSERT INTO "metric" VALUES(21,'test','loss@11-40',4,9.6330502629280090332e-01);
INSERT INTO "metric" VALUES(21,'test','output_rms',4,7.88812577724456787109e-01);
INSERT INTO "metric" VALUES(21,'test','output_rms@11-40',4,7.21879363059997558593e-01);
INSERT INTO "metric" VALUES(21,'test','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(21,'test','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(21,'train','loss',2,2.18191695213317871093e+00);
INSERT INTO "metric" VALUES(21,'train','loss',4,1.68327939510345458984e+00);
INSERT INTO "metric" VALUES(21,'validation','loss',2,1.2881667204201221466e+00);
INSERT INTO "metric" VALUES(21,'validation','loss',4,1.00667542219161987304e+00);
INSERT INTO "metric" VALUES(21,'validation','loss@11-40',2,1.00868497788906097412e+00);
INSERT INTO "metric" VALUES(21,'validation','loss@11-40',4,8.75582665205001831054e-01);
INSERT INTO "metric" VALUES(21,'validation','output_rms',2,7.47328102588653564453e-01);
INSERT INTO "metric" VALUES(21,'validation','output_rms',4,8.12733590602874755859e-01);
INSERT INTO "metric" VALUES(21,'validation','output_rms@11-40',2,7.26639211177825927734e-01);
INSERT INTO "metric" VALUES(21,'validation','output_rms@11-40',4,7.8132826089859008789e-01);
INSERT INTO "metric" VALUES(21,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(21,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(21,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(21,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(22,'cost','flops_per_token',4,18464.0);
INSERT INTO "metric" VALUES(22,'cost','state_size',4,1664.0);
INSERT INTO "metric" VALUES(22,'test','loss',4,1.82286076340824365615e+00);
INSERT INTO "metric" VALUES(22,'test','loss@11-40',4,1.68723689205944538116e+00);
INSERT INTO "metric" VALUES(22,'test','output_rms',4,2.33706891536712646484e-01);
INSERT INTO "metric" VALUES(22,'test','output_rms@11-40',4,2.18437820672988891601e-01);
INSERT INTO "metric" VALUES(22,'test','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(22,'test','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(22,'train','loss',2,3.39717745780944824218e+00);
INSERT INTO "metric" VALUES(22,'train','loss',4,2.89549040794372558593e+00);
INSERT INTO "metric" VALUES(22,'validation','loss',2,2.15827131876722);
INSERT INTO "metric" VALUES(22,'validation','loss',4,2.11804592004045844078e+00);
INSERT INTO "metric" VALUES(22,'validation','loss@11-40',2,1.94554453063756227493e+00);
INSERT INTO "metric" VALUES(22,'validation','loss@11-40',4,1.81179289706051349639e+00);
INSERT INTO "metric" VALUES(22,'validation','output_rms',2,2.08256810903549194335e-01);
INSERT INTO "metric" VALUES(22,'validation','output_rms',4,2.29360088706016540527e-01);
INSERT INTO "metric" VALUES(22,'validation','output_rms@11-40',2,2.10706830024719238281e-01);
INSERT INTO "metric" VALUES(22,'validation','output_rms@11-40',4,2.34316855669021606445e-01);
INSERT INTO "metric" VALUES(22,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(22,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(22,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(22,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(23,'cost','flops_per_token',4,11296.0);
INSERT INTO "metric" VALUES(23,'cost','state_size',4,272.0);
INSERT INTO "metric" VALUES(23,'test','loss',4,1.32619719859212636947e+00);
INSERT INTO "metric" VALUES(23,'test','loss@11-40',4,1.19722714833915233612e+00);
INSERT INTO "metric" VALUES(23,'test','output_rms',4,3.44085507094860076904e-02);
INSERT INTO "metric" VALUES(23,'test','output_rms@11-40',4,2.75315865874290466308e-02);
INSERT INTO "metric" VALUES(23,'test','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(23,'test','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(23,'train','loss',2,2.1650142669677734375e+00);
INSERT INTO "metric" VALUES(23,'train','loss',4,2.91671466827392578125e+00);
INSERT INTO "metric" VALUES(23,'validation','loss',2,1.77057098224759101867e+00);
INSERT INTO "metric" VALUES(23,'validation','loss',4,1.53589923493564128875e+00);
INSERT INTO "metric" VALUES(23,'validation','loss@11-40',2,1.49371486343443393707e+00);
INSERT INTO "metric" VALUES(23,'validation','loss@11-40',4,1.3426989307627081871e+00);
INSERT INTO "metric" VALUES(23,'validation','output_rms',2,3.6572366952896118164e-02);
INSERT INTO "metric" VALUES(23,'validation','output_rms',4,3.68537232279777526855e-02);
INSERT INTO "metric" VALUES(23,'validation','output_rms@11-40',2,3.58004830777645111083e-02);
INSERT INTO "metric" VALUES(23,'validation','output_rms@11-40',4,3.48656959831714630126e-02);
INSERT INTO "metric" VALUES(23,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(23,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(23,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(23,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(24,'cost','flops_per_token',4,11296.0);
INSERT INTO "metric" VALUES(24,'cost','state_size',4,272.0);
INSERT INTO "metric" VALUES(24,'test','loss',4,1.97733916062861680984e+00);
INSERT INTO "metric" VALUES(24,'test','loss@11-40',4,1.70798340532928705215e+00);
INSERT INTO "metric" VALUES(24,'test','output_rms',4,6.49685785174369812011e-02);
INSERT INTO "metric" VALUES(24,'test','output_rms@11-40',4,0.0635894164443016);
INSERT INTO "metric" VALUES(24,'test','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(24,'test','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(24,'train','loss',2,3.32115387916564941406e+00);
INSERT INTO "metric" VALUES(24,'train','loss',4,2.9716129302978515625e+00);
INSERT INTO "metric" VALUES(24,'validation','loss',2,2.07786220358684659004e+00);
INSERT INTO "metric" VALUES(24,'validation','loss',4,2.08238385571166872978e+00);
INSERT INTO "metric" VALUES(24,'validation','loss@11-40',2,2.04850114602595567703e+00);
INSERT INTO "metric" VALUES(24,'validation','loss@11-40',4,1.95282534603029489517e+00);
INSERT INTO "metric" VALUES(24,'validation','output_rms',2,6.56258910894393920898e-02);
INSERT INTO "metric" VALUES(24,'validation','output_rms',4,0.0695410966873169);
INSERT INTO "metric" VALUES(24,'validation','output_rms@11-40',2,7.1872621774673461914e-02);
INSERT INTO "metric" VALUES(24,'validation','output_rms@11-40',4,7.79178440570831298828e-02);
INSERT INTO "metric" VALUES(24,'validation','scaled_accuracy',2,0.0);
INSERT INTO "metric" VALUES(24,'validation','scaled_accuracy',4,0.0);
INSERT INTO "metric" VALUES(24,'validation','scaled_accuracy@11-40',2,0.0);
INSERT INTO "metric" VALUES(24,'validation','scaled_accuracy@11-40',4,0.0);
INSERT INTO "metric" VALUES(25,'cost','flops_per_token',4,16256.0);
INSERT INTO "metric" VALUES(25,'cost','state_size',4,928.0);
INSERT INTO "metric" VALUES(25,'test','accuracy',4,0.0);
INSERT INTO "metric" VALUES(25,'test','loss',4,3.95527869462966918945e+00);
INSERT INTO "metric" VALUES(25,'test','output_rms',4,3.50057065486907958984e-01);
INSERT INTO "metric" VALUES(25,'train','loss',2,4.60061931610107421875e+00);
INSERT INTO "metric" VALUES(25,'train','loss',4,4.43573474884033203125e+00);
INSERT INTO "metric" VALUES(25,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(25,'validation','accuracy',4,0.125);
INSERT INTO "metric" VALUES(25,'validation','loss',2,4.0609118044376373291e+00);
INSERT INTO "metric" VALUES(25,'validation','loss',4,4.01688167452812194824e+00);
INSERT INTO "metric" VALUES(25,'validation','output_rms',2,3.34646254777908325195e-01);
INSERT INTO "metric" VALUES(25,'validation','output_rms',4,3.36942821741104125976e-01);
INSERT INTO "metric" VALUES(26,'cost','flops_per_token',4,16256.0);
INSERT INTO "metric" VALUES(26,'cost','state_size',4,928.0);
INSERT INTO "metric" VALUES(26,'test','accuracy',4,0.0);
INSERT INTO "metric" VALUES(26,'test','loss',4,4.42406201362609863281e+00);
INSERT INTO "metric" VALUES(26,'test','output_rms',4,2.07456678152084350585e-01);
INSERT INTO "metric" VALUES(26,'train','loss',2,4.36918735504150390625e+00);
INSERT INTO "metric" VALUES(26,'train','loss',4,4.30357027053833);
INSERT INTO "metric" VALUES(26,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(26,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(26,'validation','loss',2,3.75060302019119262695e+00);
INSERT INTO "metric" VALUES(26,'validation','loss',4,3.61066842079162597656e+00);
INSERT INTO "metric" VALUES(26,'validation','output_rms',2,2.25409612059593200683e-01);
INSERT INTO "metric" VALUES(26,'validation','output_rms',4,2.36221417784690856933e-01);
INSERT INTO "metric" VALUES(27,'cost','flops_per_token',4,13440.0);
INSERT INTO "metric" VALUES(27,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(27,'test','accuracy',4,0.0);
INSERT INTO "metric" VALUES(27,'test','loss',4,4.39106807112693786621e+00);
INSERT INTO "metric" VALUES(27,'test','output_rms',4,7.01232701539993286132e-02);
INSERT INTO "metric" VALUES(27,'train','loss',2,4.88394117355346679687e+00);
INSERT INTO "metric" VALUES(27,'train','loss',4,4.68356800079345703125e+00);
INSERT INTO "metric" VALUES(27,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(27,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(27,'validation','loss',2,3.95097187161445617675e+00);
INSERT INTO "metric" VALUES(27,'validation','loss',4,3.88970911502838134765e+00);
INSERT INTO "metric" VALUES(27,'validation','output_rms',2,1.09394975006580352783e-01);
INSERT INTO "metric" VALUES(27,'validation','output_rms',4,1.11451864242553710937e-01);
INSERT INTO "metric" VALUES(28,'cost','flops_per_token',4,13440.0);
INSERT INTO "metric" VALUES(28,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(28,'test','accuracy',4,0.0);
INSERT INTO "metric" VALUES(28,'test','loss',4,4.79236501455307);
INSERT INTO "metric" VALUES(28,'test','output_rms',4,7.74621814489364624023e-02);
INSERT INTO "metric" VALUES(28,'train','loss',2,4.2219486236572265625e+00);
INSERT INTO "metric" VALUES(28,'train','loss',4,4.2126178741455078125e+00);
INSERT INTO "metric" VALUES(28,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(28,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(28,'validation','loss',2,4.17963573336601257324e+00);
INSERT INTO "metric" VALUES(28,'validation','loss',4,4.1242555975914);
INSERT INTO "metric" VALUES(28,'validation','output_rms',2,8.34980010986328125e-02);
INSERT INTO "metric" VALUES(28,'validation','output_rms',4,8.38853418827056884765e-02);
INSERT INTO "metric" VALUES(29,'cost','flops_per_token',4,13248.0);
INSERT INTO "metric" VALUES(29,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(29,'test','accuracy',4,0.0);
INSERT INTO "metric" VALUES(29,'test','loss',4,4.25962540507316589355e+00);
INSERT INTO "metric" VALUES(29,'test','output_rms',4,4.94923926889896392822e-02);
INSERT INTO "metric" VALUES(29,'train','loss',2,4.40843486785888671875e+00);
INSERT INTO "metric" VALUES(29,'train','loss',4,4.65100860595703125e+00);
INSERT INTO "metric" VALUES(29,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(29,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(29,'validation','loss',2,4.12581574916839599609e+00);
INSERT INTO "metric" VALUES(29,'validation','loss',4,4.05546116828918457031e+00);
INSERT INTO "metric" VALUES(29,'validation','output_rms',2,5.57415895164012908935e-02);
INSERT INTO "metric" VALUES(29,'validation','output_rms',4,5.57218827307224273681e-02);
INSERT INTO "metric" VALUES(30,'cost','flops_per_token',4,13248.0);
INSERT INTO "metric" VALUES(30,'cost','state_size',4,400.0);
INSERT INTO "metric" VALUES(30,'test','accuracy',4,0.0);
INSERT INTO "metric" VALUES(30,'test','loss',4,4.95785728096962);
INSERT INTO "metric" VALUES(30,'test','output_rms',4,2.61488482356071472167e-02);
INSERT INTO "metric" VALUES(30,'train','loss',2,4.34590244293212890625e+00);
INSERT INTO "metric" VALUES(30,'train','loss',4,4.10314178466796875e+00);
INSERT INTO "metric" VALUES(30,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(30,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(30,'validation','loss',2,4.10771974921226501464e+00);
INSERT INTO "metric" VALUES(30,'validation','loss',4,4.03664812445640563964e+00);
INSERT INTO "metric" VALUES(30,'validation','output_rms',2,2.86237206310033798217e-02);
INSERT INTO "metric" VALUES(30,'validation','output_rms',4,2.97420304268598556518e-02);
INSERT INTO "metric" VALUES(31,'cost','flops_per_token',4,9088.0);
INSERT INTO "metric" VALUES(31,'cost','state_size',4,272.0);
INSERT INTO "metric" VALUES(31,'test','accuracy',4,0.0);
INSERT INTO "metric" VALUES(31,'test','loss',4,4.29007317125797271728e+00);
INSERT INTO "metric" VALUES(31,'test','output_rms',4,3.87333706021308898925e-02);
INSERT INTO "metric" VALUES(31,'train','loss',2,4.54002857208251953125e+00);
INSERT INTO "metric" VALUES(31,'train','loss',4,4.71657085418701171875e+00);
INSERT INTO "metric" VALUES(31,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(31,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(31,'validation','loss',2,4.0311558544635772705e+00);
INSERT INTO "metric" VALUES(31,'validation','loss',4,3.99127250909805297851e+00);
INSERT INTO "metric" VALUES(31,'validation','output_rms',2,5.09310849010944366455e-02);
INSERT INTO "metric" VALUES(31,'validation','output_rms',4,5.28928078711032867431e-02);
INSERT INTO "metric" VALUES(32,'cost','flops_per_token',4,9088.0);
INSERT INTO "metric" VALUES(32,'cost','state_size',4,272.0);
INSERT INTO "metric" VALUES(32,'test','accuracy',4,0.0);
INSERT INTO "metric" VALUES(32,'test','loss',4,4.76464000344276428222e+00);
INSERT INTO "metric" VALUES(32,'test','output_rms',4,1.95350348949432373046e-02);
INSERT INTO "metric" VALUES(32,'train','loss',2,4.40588092803955078125e+00);
INSERT INTO "metric" VALUES(32,'train','loss',4,4.18265008926391601562e+00);
INSERT INTO "metric" VALUES(32,'validation','accuracy',2,0.0);
INSERT INTO "metric" VALUES(32,'validation','accuracy',4,0.0);
INSERT INTO "metric" VALUES(32,'validation','loss',2,4.05341002345085144042e+00);
INSERT INTO "metric" VALUES(32,'validation','loss',4,4.0172360241413116455e+00);
INSERT INTO "metric" VALUES(32,'validation','output_rms',2,2.21877191215753555297e-02);
INSERT INTO "metric" VALUES(32,'validation','output_rms',4,2.19100788235664367675e-02);
CREATE TABLE rule_version (
	id INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	hash VARCHAR NOT NULL, 
	source VARCHAR NOT NULL, 
	CONSTRAINT pk_rule_version PRIMARY KEY (id), 
	CONSTRAINT uq_rule_version_name_hash UNIQUE (name, hash)
);
INSERT INTO "rule_version" VALUES(1,'comba','6aa3c8aadf102ad0fc245606285b31baad65e9c9e99a4ef76b1b283a0741ccff','"""Comba: the delta rule in closed loop, with feedback weaker than the input and a corrected output."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DPLR, IPLR, SPLR, Transition

DECAY_OF = {"mamba2_step": "mamba2_decay", "metala_input": "metala_decay"}
"""The forget gate whose projection each of these input gates shares."""


@gates.parameterization
def low_rank_decay(rank: float = 16) -> Gate:
    """g = -a softplus(W_1 W_2 x + c): Comba''s forget gate through `rank` channels (LoRA), for a DPLR''s channels.

    Section 3 of arXiv:2506.02475 describes RWKV-7''s diagonal so. a and c start as in `mamba2_decay`.
    """
    if rank < 1:
        raise InputError(f"low_rank_decay.rank must be at least 1, not {rank:g}")
    return replace(gates.mamba2_decay(), rank=int(rank))


@dataclass(frozen=True, kw_only=True)
class Comba(UpdateRule):
    """S_t = (alpha_t I - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   alpha_t = exp(g_t)        (SPLR)
    S_t = alpha_t (I - 2 b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T                             (IPLR)
    S_t = (diag(alpha_t) - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T                           (DPLR)
    o_t = scale S_t^T (q_t - d k_t)   or, through p_t = b k_t,   scale S_t^T (q_t - d p_t)

    Hu et al. 2025 (arXiv:2506.02475, Eq. 5 and Table 4; App. B.3 for p), with a DPLR as Section 3 writes RWKV-7''s. The
    paper calls the two forms of the output equivalent; they differ by the factor b in the correction, so they are a
    knob here. FLA''s kernels normalize p, which cancels b: nothing is normalized after a gate has scaled it here.
    beta: the input gates of Table 5. Those of Mamba2 and MetaLA share the projection of their forget gate, and GLA has
    none. silu: which of q, k and v get SiLU. normalize: whether q and k have unit norm (Section 3.3); without it,
    b beta |k|^2 may exceed 2, and the state may grow.
    """

    name: ClassVar[str] = "comba"
    paper: ClassVar[str] = "arXiv:2506.02475"

    transition: Transition = knob(SPLR, IPLR, DPLR)
    g: Gate = knob(gates.mamba2_decay(), gates.gla_decay(), gates.metala_decay(), low_rank_decay())
    beta: Gate = knob(gates.sigmoid(), gates.mamba2_step(), gates.metala_input(), gates.const(1))
    b: Gate = knob(gates.head_sigmoid(), gates.const(1))
    d: Gate = knob(gates.head(init=0.02), gates.head(init=1), gates.const(0))
    correction: str = knob("k", "p")
    silu: str = knob("qkv", "qk")
    normalize: bool = knob(True, False)

    def __post_init__(self) -> None:
        decay = DECAY_OF.get(self.beta.kind)
        if decay is None:
            return
        if self.g.kind != decay:
            raise InputError(f"{self.name}.beta {self.beta.kind} shares the projection of g {decay}: set g to it")
        if self.transition == DPLR:
            raise InputError(f"{self.name}.beta {self.beta.kind} is one number for each head: a DPLR''s g has channels")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "unit" if self.normalize else "silu"

    @property
    def silu_of_v(self) -> bool:
        return self.silu == "qkv"

    @property
    def eigenvalues(self) -> tuple[float, float]:
        # Mamba2''s input gate has no upper bound.
        return (-1.0 if self.beta.high <= 1 else -math.inf, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, b: Tensor, d: Tensor) -> Operands:
        strength = d if self.correction == "k" else d * b
        feedback = 2 * b * beta if self.transition is IPLR else b * beta
        return Operands(r=q, k=k, u=v, g=g, e=feedback, beta=beta, d=strength)
');
INSERT INTO "rule_version" VALUES(2,'gka','54716fc5aad8dd4546ee3292671dc05fc527942ae91817dff0b6e9846e72df80','"""Gated KalmaNet: each token''s output is a ridge regression on all the past, solved by Chebyshev iteration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.ridge import fused_regression, lacks_kernel, regression
from deltalab.rule import State, UpdateRule, knob
from deltalab.structure import Ridge


@dataclass(frozen=True, kw_only=True)
class GKA(UpdateRule):
    """H_t = alpha_t H_{t-1} + k_t k_t^T
    U_t = alpha_t U_{t-1} + k_t v_t^T
    o_t = scale U_t^T x_t,   x_t ~= (H_t + lambda_t I)^{-1} q_t,   alpha_t = exp(g_t)

    Peng et al. 2025 (arXiv:2511.21016, Section 4). The state is the pair (H, U), both decaying with eigenvalue
    alpha_t. lambda_t = ridge ||H_t||_F where adaptive, which bounds the condition number by (1 + ridge) / ridge; else
    lambda_t = ridge. solver: Chebyshev iteration, conjugate gradient, or exact. Gradients are those of the exact
    solution (implicit differentiation), with the solver''s own error. A token costs 3 K^2 an iteration, but K^3 exact.
    """

    name: ClassVar[str] = "gka"
    paper: ClassVar[str] = "arXiv:2511.21016"

    g: Gate = knob(forms.mamba2_decay(), forms.gla_decay(), forms.const(0))
    ridge: float = knob(0.02, 0.2, 0.001)
    adaptive: bool = knob(True, False)
    solver: str = knob("chebyshev", "cg", "exact")
    iterations: int = knob(30, 10, 1)

    def __post_init__(self) -> None:
        if self.solver == "exact" and self.iterations != 30:
            raise InputError(f"{self.name}.iterations has no effect with solver exact: leave it out")

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        batch, _, heads, key_dim = k.shape
        empty = [v.new_zeros(batch, heads, key_dim, width, dtype=dtype) for width in (key_dim, v.shape[-1])]
        return empty[0], empty[1]

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        gram, memory = state
        return regression(self._regression, q, k, v, gates["g"], scale=scale, state=(gram, memory))

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        gram, memory = state
        return fused_regression(self._regression, q, k, v, gates["g"], scale=scale, state=(gram, memory))

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        return lacks_kernel(self._regression, k, v)

    @property
    def _regression(self) -> Ridge:
        return Ridge(
            solver=cast(Any, self.solver),
            iterations=self.iterations,
            strength=self.ridge,
            adaptive=self.adaptive,
        )
');
INSERT INTO "rule_version" VALUES(3,'rdn','a43c6ab27e267068353e698fd60d1eb53ba9c52debc02a93067ed285ad12b37f','"""Residual Delta Net: both states, the one that predicts and the one that corrects, follow the delta rule."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import Fit, Operands, UpdateRule, knob
from deltalab.structure import IPLR, ResidualState, Transition


@dataclass(frozen=True, kw_only=True)
class RDN(UpdateRule):
    """r_t = clip(v_t - S_{t-1}^T k_t, -c, c)
    R_t = alpha_t (I - gamma_t k_t k_t^T) R_{t-1} + gamma_t k_t r_t^T
    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    o_t = scale (alpha_t S_{t-1}^T q_t + gamma_t R_t^T q_t),   alpha_t = exp(g_t)

    "Enhancing linear attention with residual learning" (Section 3.4; losses in App. B). The residual
    reads the undecayed S_{t-1}. loss: huber clips the residual to [-clip, clip], log_cosh is its tanh, l2 leaves it as
    it is. output: `sum` reads without alpha and gamma (Table 5). fitting: without it R_t = k_t r_t^T holds the current
    token alone (Section 4.3, with l2: it does not clip), and l2 at alpha = 1 corrects by one step of the delta rule on
    S_{t-1}. g 0, beta 1 and gamma 1 make the rule without gates (Section 3.1, App. B). silu: which of q, k and v get
    SiLU; the paper names q and k alone (Section 3.4). normalize: whether q and k have unit norm (Section 3.3).
    """

    name: ClassVar[str] = "rdn"
    paper: ClassVar[str] = "Enhancing linear attention with residual learning"

    transition: Transition = IPLR
    g: Gate = knob(gates.mamba2_decay(), gates.const(0))
    beta: Gate = knob(gates.sigmoid(), gates.const(1))
    gamma: Gate = knob(gates.sigmoid(), gates.like_beta(), gates.const(1))
    loss: str = knob("huber", "log_cosh", "l2")
    clip: float = knob(1.0, 0.5, 2.0)
    output: str = knob("gated", "sum")
    fitting: bool = knob(True, False)
    silu: str = knob("qkv", "qk")
    normalize: bool = knob(True, False)

    def __post_init__(self) -> None:
        if self.loss != "huber" and self.clip != 1.0:
            raise InputError(f"{self.name}.clip has no effect with loss {self.loss}: it is huber''s")
        if self.gamma.of is not None and self.beta.constant:
            raise InputError(f"{self.name}.gamma like_beta shares beta''s projection, which a constant beta lacks")
        if self.output == "sum" and not self.fitting:
            raise InputError(
                f"{self.name}: without fitting, gamma acts in the output alone, which `sum` reads without it"
            )

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "unit" if self.normalize else "silu"

    @property
    def silu_of_v(self) -> bool:
        return self.silu == "qkv"

    @property
    def second_state(self) -> bool:
        return True

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, gamma: Tensor) -> Operands:
        gated = self.output == "gated"
        fit = Fit(
            residual=ResidualState(loss=cast(Any, self.loss), clip=self.clip),
            r=q,
            read=gamma if gated else None,
            v=v,
            # Without fitting R_t = k_t r_t^T: it forgets all, and gamma is left to the output.
            strength=gamma if self.fitting else torch.ones_like(gamma),
            g=None if self.fitting else torch.full_like(g, -torch.inf),
            e=gamma,
        )
        return Operands(r=q, k=k, u=v, g=g, e=beta, beta=beta, read=g.exp() if gated else None, fit=fit)
');
CREATE TABLE run (
	id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	seed BIGINT NOT NULL, 
	state VARCHAR NOT NULL, 
	diverged_at INTEGER, 
	CONSTRAINT pk_run PRIMARY KEY (id), 
	CONSTRAINT fk_run_trial_id FOREIGN KEY(trial_id) REFERENCES trial (id) ON DELETE CASCADE, 
	CONSTRAINT uq_run_trial_id_seed UNIQUE (trial_id, seed)
);
INSERT INTO "run" VALUES(1,1,1000001,'done',NULL);
INSERT INTO "run" VALUES(2,2,1000001,'done',NULL);
INSERT INTO "run" VALUES(3,3,1000001,'done',NULL);
INSERT INTO "run" VALUES(4,4,1000001,'done',NULL);
INSERT INTO "run" VALUES(5,5,1000001,'done',NULL);
INSERT INTO "run" VALUES(6,6,1000001,'done',NULL);
INSERT INTO "run" VALUES(7,7,1000001,'done',NULL);
INSERT INTO "run" VALUES(8,8,1000001,'done',NULL);
INSERT INTO "run" VALUES(9,9,1000001,'done',NULL);
INSERT INTO "run" VALUES(10,10,1000001,'done',NULL);
INSERT INTO "run" VALUES(11,11,1000001,'done',NULL);
INSERT INTO "run" VALUES(12,12,1000001,'done',NULL);
INSERT INTO "run" VALUES(13,13,1000001,'done',NULL);
INSERT INTO "run" VALUES(14,14,1000001,'done',NULL);
INSERT INTO "run" VALUES(15,15,1000001,'done',NULL);
INSERT INTO "run" VALUES(16,16,1000001,'done',NULL);
INSERT INTO "run" VALUES(17,17,1,'done',NULL);
INSERT INTO "run" VALUES(18,17,2,'done',NULL);
INSERT INTO "run" VALUES(19,18,1,'done',NULL);
INSERT INTO "run" VALUES(20,18,2,'done',NULL);
INSERT INTO "run" VALUES(21,19,1,'done',NULL);
INSERT INTO "run" VALUES(22,19,2,'done',NULL);
INSERT INTO "run" VALUES(23,20,1,'done',NULL);
INSERT INTO "run" VALUES(24,20,2,'done',NULL);
INSERT INTO "run" VALUES(25,21,1,'done',NULL);
INSERT INTO "run" VALUES(26,21,2,'done',NULL);
INSERT INTO "run" VALUES(27,22,1,'done',NULL);
INSERT INTO "run" VALUES(28,22,2,'done',NULL);
INSERT INTO "run" VALUES(29,23,1,'done',NULL);
INSERT INTO "run" VALUES(30,23,2,'done',NULL);
INSERT INTO "run" VALUES(31,24,1,'done',NULL);
INSERT INTO "run" VALUES(32,24,2,'done',NULL);
CREATE TABLE study (
	id INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	profile VARCHAR, 
	identity VARCHAR NOT NULL, 
	spec JSON NOT NULL, 
	state VARCHAR NOT NULL, 
	created_at DATETIME NOT NULL, 
	finished_at DATETIME, 
	provenance JSON NOT NULL, 
	CONSTRAINT pk_study PRIMARY KEY (id), 
	CONSTRAINT uq_study_identity UNIQUE (identity)
);
INSERT INTO "study" VALUES(1,'released',NULL,'da0220664877ce659aa1d4cd392ad3bde4e7b02da4a9382c5e7d55d457320e4a','{"name": "released", "description": "", "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}, "parity": {}}, "base": {"rule": "comba", "model": {"d_model": 16, "layers": 1, "heads": 2}, "train": {"steps": 4, "batch_size": 4, "lr": 0.02, "evaluations": 2, "eval_batches": 1}}, "for_task": {}, "ablate": [], "factorial": [], "arms": {"gka": {"rule": {"name": "gka", "iterations": 2}, "model": {}, "train": {}}, "rdn": {"rule": "rdn", "model": {}, "train": {}}, "hybrid": {"rule": null, "model": {"layers": 2, "attention": [1]}, "train": {}}}, "tune": {"trials": 2, "seeds": 1, "train.lr": {"log_uniform": [0.005, 0.05], "uniform": null, "integers": null, "choice": null}}, "search": null, "seeds": 2, "resources": {"cpu": 1.0, "gpu": 0.0, "stack": "auto"}, "deadline": null}','done','2026-11-22 16:45:21.856925','2026-11-22 16:45:28.269759','{"git": null, "versions": {"python": "3.11.7", "deltalab": "0.1.0", "torch": "2.13.0+cpu", "numpy": "2.3.5", "ray": "2.60.0", "optuna": "5.0.0", "sqlalchemy": "2.1.9"}, "hardware": {"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm", "cpus": 2, "gpus": 0}, "command": ["platform", "study", "run", "study.yaml", "--executor", "inline"], "tasks": {"mqar": {"metric": "accuracy", "maximize": true, "chance": 0.0625, "version": 1, "parameters": {"length": 16, "pairs": 2, "vocab_size": 32, "random_non_queries": false, "power": 0.01, "mixture": [], "tests": [], "train_examples": null}, "fingerprint": ""}, "parity": {"metric": "scaled_accuracy", "maximize": true, "chance": 0.0, "version": 1, "parameters": {"length_range": [3, 40], "test_range": [40, 256]}, "fingerprint": ""}}}');
CREATE TABLE trial (
	id INTEGER NOT NULL, 
	"key" VARCHAR NOT NULL, 
	task VARCHAR NOT NULL, 
	task_version INTEGER NOT NULL, 
	stage VARCHAR NOT NULL, 
	config JSON NOT NULL, 
	state VARCHAR NOT NULL, 
	error VARCHAR, 
	started_at DATETIME NOT NULL, 
	finished_at DATETIME NOT NULL, 
	seconds DOUBLE NOT NULL, 
	parameters BIGINT, 
	state_size BIGINT, 
	tokens_per_second DOUBLE, 
	hardware JSON NOT NULL, 
	rule_version_id INTEGER NOT NULL, 
	CONSTRAINT pk_trial PRIMARY KEY (id), 
	CONSTRAINT fk_trial_rule_version_id FOREIGN KEY(rule_version_id) REFERENCES rule_version (id), 
	CONSTRAINT uq_trial_key UNIQUE ("key")
);
INSERT INTO "trial" VALUES(1,'6501a80a801611cf28dabc661534d5d5d834c757b7fd0ab38964b5745d287d09','parity',1,'tune','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:21.941203','2026-11-22 16:45:24.531189',1.29499328136444091796e+00,3952,272,1.17800993005391119367e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(2,'f9451f655541b188e783d6b28ac49d9490dd4e66894fc29dc6a08a6a978dc250','parity',1,'tune','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.008593643450468182, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:21.941203','2026-11-22 16:45:24.531239',1.29501795768737792968e+00,3952,272,1.17800993005391119367e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(3,'5c14ebe4d4f073e943d2766fdcc2a2911eea2594f093f7760684d2148e486e09','parity',1,'tune','{"rule": {"name": "gka", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "ridge": 0.02, "adaptive": true, "solver": "chebyshev", "iterations": 2}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:24.574414','2026-11-22 16:45:24.811114',1.18349790573120117187e-01,3916,400,1.16891391460494069179e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',2);
INSERT INTO "trial" VALUES(4,'20c2bf7b8e6409f80c9bb7f005110b92214534c59690f72e8a30cd3748278d02','parity',1,'tune','{"rule": {"name": "gka", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "ridge": 0.02, "adaptive": true, "solver": "chebyshev", "iterations": 2}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.008593643450468182, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:24.574414','2026-11-22 16:45:24.811162',1.18373751640319824218e-01,3916,400,1.16891391460494069179e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',2);
INSERT INTO "trial" VALUES(5,'21eb47778dcca0413da3dd822ffcd376a80a8cd89cf7c3efcc4955426d60281c','parity',1,'tune','{"rule": {"name": "rdn", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "gamma": {"sigmoid": {"max": 1.0}}, "loss": "huber", "clip": 1.0, "output": "gated", "fitting": true, "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:24.839653','2026-11-22 16:45:25.122344',1.41345620155334472656e-01,3980,400,1.02951176311432463991e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',3);
INSERT INTO "trial" VALUES(6,'dbcf8c51a6be11706e3bb712fe336d89c5689ea989864835bde3b41f9e4be99a','parity',1,'tune','{"rule": {"name": "rdn", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "gamma": {"sigmoid": {"max": 1.0}}, "loss": "huber", "clip": 1.0, "output": "gated", "fitting": true, "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.008593643450468182, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:24.839653','2026-11-22 16:45:25.122393',1.41370058059692382812e-01,3980,400,1.02951176311432463991e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',3);
INSERT INTO "trial" VALUES(7,'f493f53391ce96563f145cfdec9d39bc22e9d707e188974eefadfabec74c02b9','parity',1,'tune','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 2, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [1], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:25.150807','2026-11-22 16:45:25.406109',1.27651095390319824218e-01,7768,1664,1.18641232762133386126e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(8,'0498ebf6bc4b1c54b71efbe9039297f45d71577d7347cf05c8294aa1994283e4','parity',1,'tune','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 2, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [1], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.008593643450468182, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:25.150807','2026-11-22 16:45:25.406167',1.27680301666259765625e-01,7768,1664,1.18641232762133386126e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(9,'5eb05c45a3db777870e83fed789d0d6643055e4cc52f89a91770bd402d6a638e','mqar',1,'tune','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:25.439251','2026-11-22 16:45:25.579305',7.00266361236572265625e-02,4416,272,6.96558760268908463324e+03,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(10,'4dafdd90cfe5dd04fdb98b9c3c4908f6769ad1556085faca464f238ad78f32d4','mqar',1,'tune','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.008593643450468182, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:25.439251','2026-11-22 16:45:25.579349',7.00486898422241210937e-02,4416,272,6.96558760268908463324e+03,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(11,'f9fff1006f3e4167dd1c20364f6b3b0b90a3fdb716558632d92ccf9cbb6d94bf','mqar',1,'tune','{"rule": {"name": "gka", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "ridge": 0.02, "adaptive": true, "solver": "chebyshev", "iterations": 2}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:25.606893','2026-11-22 16:45:25.776282',0.0846942663192749,4380,400,5.36205181258057746174e+03,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',2);
INSERT INTO "trial" VALUES(12,'ad78ccffcbc4c15452db3df187f069e6669d0dbd47e842763e7d4dd344506b66','mqar',1,'tune','{"rule": {"name": "gka", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "ridge": 0.02, "adaptive": true, "solver": "chebyshev", "iterations": 2}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.008593643450468182, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:25.606893','2026-11-22 16:45:25.776325',8.47156047821044921875e-02,4380,400,5.36205181258057746174e+03,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',2);
INSERT INTO "trial" VALUES(13,'c91336ba92e1fa5eba167b4c3873198ac28e5715f40449d9cceb51e41fce9971','mqar',1,'tune','{"rule": {"name": "rdn", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "gamma": {"sigmoid": {"max": 1.0}}, "loss": "huber", "clip": 1.0, "output": "gated", "fitting": true, "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:25.803023','2026-11-22 16:45:26.000530',0.0987539291381836,4444,400,4.6831146250214542308e+03,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',3);
INSERT INTO "trial" VALUES(14,'6b5f54c40d56a99a1eb81461086da7bd42b32aa56db31bbbb6c340ddf6256fee','mqar',1,'tune','{"rule": {"name": "rdn", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "gamma": {"sigmoid": {"max": 1.0}}, "loss": "huber", "clip": 1.0, "output": "gated", "fitting": true, "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.008593643450468182, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:25.803023','2026-11-22 16:45:26.000574',9.87758636474609375e-02,4444,400,4.6831146250214542308e+03,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',3);
INSERT INTO "trial" VALUES(15,'c126a564e1409a26f10a8d1cefe87c7d7d412f20ff1a3de0d4dc577448f39543','mqar',1,'tune','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 2, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [1], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:26.025960','2026-11-22 16:45:26.212506',9.32729244232177734375e-02,8232,928,5.18328595170509288415e+03,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(16,'5ceb42321b00b6c7e08b242328e44dc0714032efcf8c9d96ced19644b6b12199','mqar',1,'tune','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 2, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [1], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.008593643450468182, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:26.025960','2026-11-22 16:45:26.212554',9.329700469970703125e-02,8232,928,5.18328595170509288415e+03,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(17,'de819afca364fd60619c277c7566589729c54b3fc083c0586023f46f1f555390','parity',1,'confirm','{"rule": {"name": "gka", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "ridge": 0.02, "adaptive": true, "solver": "chebyshev", "iterations": 2}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:26.241591','2026-11-22 16:45:26.519061',2.77469635009765625e-01,3916,400,1.18179117742893231477e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',2);
INSERT INTO "trial" VALUES(18,'d267cd3aae0bf5d29af6fa01ab0534e8d7d6df82e1ea2ed702ca4491b113912d','parity',1,'confirm','{"rule": {"name": "rdn", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "gamma": {"sigmoid": {"max": 1.0}}, "loss": "huber", "clip": 1.0, "output": "gated", "fitting": true, "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:26.536383','2026-11-22 16:45:26.873348',3.36964845657348632812e-01,3980,400,1.02509610213130363258e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',3);
INSERT INTO "trial" VALUES(19,'c7a7524f9ca48b499bb3b29e22378946a94ea47ddb8bf1d46df0b2987a3d0404','parity',1,'confirm','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 2, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [1], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:26.888311','2026-11-22 16:45:27.200336',3.12024831771850585937e-01,7768,1664,1.13534264053895567485e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(20,'e7aad8d2412780a03dece0961cd704e38596f0b566831a48d6fa1ca1875aed74','parity',1,'confirm','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 3, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:27.213399','2026-11-22 16:45:27.440857',2.2745800018310546875e-01,3952,272,1.58740096138040280493e+04,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(21,'be436dfbc17c0a79c1c7a4da835be56520a71ec3a0fed0c77bf3a991f03eb5f5','mqar',1,'confirm','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 2, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [1], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:27.457085','2026-11-22 16:45:27.661639',2.04554080963134765625e-01,8232,928,5326.88325450546,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
INSERT INTO "trial" VALUES(22,'75411c0e7d8e57f796b624506130c905cefe835a94161f0c8d6db701aeda66e6','mqar',1,'confirm','{"rule": {"name": "gka", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "ridge": 0.02, "adaptive": true, "solver": "chebyshev", "iterations": 2}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:27.675701','2026-11-22 16:45:27.859211',1.8350982666015625e-01,4380,400,5.3496014154844870065e+03,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',2);
INSERT INTO "trial" VALUES(23,'6a575ced0318e7c708f4a881e6ba45d692fc426bb3be5e59f4d51560c472b223','mqar',1,'confirm','{"rule": {"name": "rdn", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "gamma": {"sigmoid": {"max": 1.0}}, "loss": "huber", "clip": 1.0, "output": "gated", "fitting": true, "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:27.873062','2026-11-22 16:45:28.088443',2.15380430221557617187e-01,4444,400,4.87157027891251891539e+03,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',3);
INSERT INTO "trial" VALUES(24,'d158431b2eaccbc0f617ba29697ea39eb4787c6055a308294a3a7a14d2a9d20e','mqar',1,'confirm','{"rule": {"name": "comba", "transition": "splr", "g": {"mamba2_decay": {"a_min": 1.0, "a_max": 16.0, "dt_min": 0.001, "dt_max": 0.1}}, "beta": {"sigmoid": {"max": 1.0}}, "b": {"head_sigmoid": {"init": 0.5}}, "d": {"head": {"init": 0.02}}, "correction": "k", "silu": "qkv", "normalize": true}, "model": {"vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2, "key_dim": null, "expand_v": 1.0, "conv": 4, "output_norm": true, "output_gate": true, "block": "transformer", "mlp": true, "attention": [], "window": 0, "tie_embeddings": true, "readout": "position", "chunk_size": 64}, "train": {"steps": 4, "batch_size": 4, "lr": 0.012974750781053066, "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0, "betas": [0.9, 0.95], "evaluations": 2, "eval_batches": 1, "precision": "auto", "device": "auto"}}','done',NULL,'2026-11-22 16:45:28.101595','2026-11-22 16:45:28.254021',1.52425527572631835937e-01,4416,272,7131.21598984134,'{"device": "CPU, 1 thread(s)", "torch": "2.13.0+cpu", "host": "vm"}',1);
CREATE INDEX ix_study_name ON study (name);
CREATE INDEX ix_trial_rule_version_id ON trial (rule_version_id);
CREATE INDEX ix_arm_trial_trial_id ON arm_trial (trial_id);
CREATE INDEX ix_artifact_run_id ON artifact (run_id);
COMMIT;
